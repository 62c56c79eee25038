"""Draw the README's picture from a comparison, as `make run` leaves one.

    python docs/picture.py runs/<start>-compare docs/main-job.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from tepal.tools.compare.comparison import measure, read_comparison
from tepal.tools.compare.picture import draw


def main(comparison: Path, target: Path) -> None:
    target.write_text(draw(measure(read_comparison(comparison))), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
