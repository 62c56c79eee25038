"""The baselines that the papers compare with: one module for each method."""
