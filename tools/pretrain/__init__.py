"""Pretraining of the small models whose weights come with Tepal: `python -m tepal.tools.pretrain --help`."""
