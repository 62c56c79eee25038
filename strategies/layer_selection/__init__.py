"""Which layers each client trains: problem (P1) of selective layer fine-tuning (arXiv:2408.15600), and its rivals.

`problem` states (P1) and its objective, and `checks` checks its arguments. `select` solves it by `exact` (a
mixed-integer program) or by `fast`, which improves masks by `ascent` of one client at a time and by `exchange` of
layers between groups of clients; `knapsack` is the problem of one client alone. `rivals` are selections by other rules,
and `budgets` draws a client's budget.
"""

from tepal.strategies.layer_selection.budgets import drawn_budget
from tepal.strategies.layer_selection.checks import DISTANCES
from tepal.strategies.layer_selection.problem import objective
from tepal.strategies.layer_selection.rivals import SELECTIONS, choose
from tepal.strategies.layer_selection.select import SOLVERS, select_layers

__all__ = ["DISTANCES", "SELECTIONS", "SOLVERS", "choose", "drawn_budget", "objective", "select_layers"]
