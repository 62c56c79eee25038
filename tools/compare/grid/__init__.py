"""Comparisons of a grid: every strategy or variant with every combination of values of run config keys."""
