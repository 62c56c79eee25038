"""Print docs/run-config.md: `python -m tepal.server_app.config`."""

from tepal.server_app.config.key_table import reference

print(reference(), end="")
