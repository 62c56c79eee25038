"""Models mixed by how much they point the same way: the mathematics of FedACS (arXiv:2312.15148), over arrays alone.

Client i has the model w_i, a row of numbers. Before a round every client's next model is a mean of the models that
are most like its own:

    s_ij = cos(w_i, w_j)
    δ    = p-quantile of all n² elements of S, the diagonal included
    u_i  = Σ_{j: s_ij > δ} s_ij·w_j / Σ_{j: s_ij > δ} s_ij                                         (eq. 4)

Beyond the paper: a client's own model always takes part, so that no sum is empty (s_ii > δ fails where δ = 1, as with
models that are all equal); a negative similarity weighs 0; and `alpha` below 1 goes only part of the way from w_i to
u_i.

Every function takes the models as an array (n, P) or as anything that hands out blocks of columns (`Models`), so that
n models may lie in a file and be larger than memory. In memory are then a few blocks of columns of all models for each
core, and n² numbers. The order of the work is: `update_gram` for the clients that have reported, `cosine`, `mix_rows`.
"""

from tepal.strategies.mixing.columns import Models
from tepal.strategies.mixing.gram import gram_rows, update_gram
from tepal.strategies.mixing.mixtures import mix, mix_rows, weighted_rows
from tepal.strategies.mixing.weights import cosine, mixing_weights, threshold

__all__ = [
    "Models", "cosine", "gram_rows", "mix", "mix_rows", "mixing_weights", "threshold", "update_gram", "weighted_rows",
]  # fmt: skip
