"""Readers of files and tables, one file a format; `sources.py` chooses among them."""
