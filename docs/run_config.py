"""Write the page of all keys of the run config.

    python docs/run_config.py > docs/run-config.md
"""

from tepal.server_app.config import reference

print(reference(), end="")
