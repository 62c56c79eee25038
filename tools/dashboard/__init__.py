"""`tepal dashboard`: runs in a browser, while they go on and afterwards."""
