"""Selection of the layers that each client trains: problem (P1) of arXiv:2408.15600, and simpler rules.

`problem` has (P1) and its objective, and `checks` checks the arguments. `select` solves (P1) by `exact` (a
mixed-integer program) or by `fast`, a local search that changes the mask of one client (`ascent`) or swaps layers for a
group of clients (`swaps`); `knapsack` solves the problem of a single client. `rules` has the other selections, and
`budgets` draws clients' budgets.
"""

from tepal.strategies.layer_selection.budgets import drawn_budget
from tepal.strategies.layer_selection.checks import DISTANCES
from tepal.strategies.layer_selection.problem import objective
from tepal.strategies.layer_selection.rules import SELECTIONS, choose, relative_coupling
from tepal.strategies.layer_selection.select import SOLVERS, select_layers

__all__ = [
    "DISTANCES", "SELECTIONS", "SOLVERS", "choose", "drawn_budget", "objective", "relative_coupling", "select_layers",
]  # fmt: skip
