"""A run as pages, figures and text in the terminal."""
