"""Comparisons of strategies on one task: their runs, tables, pictures and page."""
