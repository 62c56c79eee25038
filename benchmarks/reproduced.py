"""What `tepal reproduce` found, all experiments on one page.

    python benchmarks/reproduced.py FOLDER > docs/reproduced.md

FOLDER is that of `tepal reproduce --folder`. Nothing is computed here.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tepal.tools.reproduce.runner import EXPERIMENTS

INTRODUCTION = """# The papers' numbers, as they came out here

What `tepal reproduce` wrote on a machine with two processors, each experiment once and in its small setting but where
another is named; whatever came out. Beside our numbers stand the paper's, of its own sizes. What a setting leaves out
of the paper's, and what the paper does not say and was chosen here, is in front of each; how to run them, and what they
say, is [on the page before](reproduce.md).

Seconds are those of the cells, two of which were computed at a time where data is trained on; mean ± standard deviation
over seeds, where there are several.
"""


def main() -> None:
    folder = Path(sys.argv[1])
    found = [folder / f"{name}{scale}" / "results.md" for name in EXPERIMENTS for scale in ("", "-full")]
    print("\n".join([INTRODUCTION, *(path.read_text(encoding="utf-8") for path in found if path.exists())]), end="")


if __name__ == "__main__":
    main()
