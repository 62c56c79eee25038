"""The packages of the checkout: tepal/ has a link to each."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = tuple(sorted(path.name for path in (ROOT / "tepal").iterdir() if path.is_symlink()))
BUNDLED = tuple(name for name in PACKAGES if name != "tools")
"""Those in the app bundle, which clients get."""
