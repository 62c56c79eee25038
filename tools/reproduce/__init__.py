"""Experiments of the papers by name, for `tepal reproduce NAME`: one file each, and what they share."""
