"""Write the results of `tepal reproduce`, all experiments on one page; nothing is computed.

    python benchmarks/reproduced.py FOLDER > docs/reproduced.md

FOLDER is that of `tepal reproduce --folder`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from tepal.tools.reproduce.runner import EXPERIMENTS

INTRODUCTION = """# All reproduced tables

The output of `tepal reproduce` on a machine with two processors, unselected: each experiment once, in its small setting
unless another is named. The paper's numbers are next to ours, at the paper's own scale. The list before the tables
gives the differences from the paper's setting, and the settings that the paper omits and were chosen here. How to run
the experiments, and a summary, are [here](reproduce.md).

Times are sums over the trials, of which two were computed at a time if they train on data. Figures are mean ± standard
deviation over seeds, if there are several.
"""


def main() -> None:
    folder = Path(sys.argv[1])
    found = [folder / f"{name}{scale}" / "results.md" for name in EXPERIMENTS for scale in ("", "-full")]
    print("\n".join([INTRODUCTION, *(path.read_text(encoding="utf-8") for path in found if path.exists())]), end="")


if __name__ == "__main__":
    main()
