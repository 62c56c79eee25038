"""Draw the README's picture from a comparison, as `make run` leaves one.

    python docs/picture.py runs/<start>-compare docs/main-job.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

from tepal.tools.compare.bars import picture_of
from tepal.tools.compare.comparison import measure, read_comparison


def main(comparison: Path, target: Path) -> None:
    target.write_text(picture_of(measure(read_comparison(comparison))), encoding="utf-8")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
