"""Searches for settings: run config keys are drawn from ranges by Optuna, and the best values of each variant kept."""
