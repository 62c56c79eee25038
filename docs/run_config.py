"""Write docs/run-config.md, docs/strategies.md, and the defaults of all keys in pyproject.toml.

    python docs/run_config.py

They follow from the declarations of the run config's keys and of the strategies. Flower reads the defaults from
pyproject.toml, and refuses a key of `--run-config` that is not there.
"""

import json
import re
from pathlib import Path

from tepal.server_app.config import defaults, reference, strategies

ROOT = Path(__file__).resolve().parents[1]
BLOCK = re.compile(r"(?<=\[tool\.flwr\.app\.config\]\n).*?(?=# === End)", re.DOTALL)


def generated() -> dict[Path, str]:
    """Return file → its text."""
    pyproject = ROOT / "pyproject.toml"
    keys = "".join(f"{key} = {json.dumps(value)}\n" for key, value in defaults().items())
    return {
        ROOT / "docs/run-config.md": reference(),
        ROOT / "docs/strategies.md": strategies(),
        pyproject: BLOCK.sub(lambda _: keys, pyproject.read_text(), count=1),
    }


if __name__ == "__main__":
    for path, text in generated().items():
        path.write_text(text)
