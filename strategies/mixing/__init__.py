"""The mathematics of FedACS (arXiv:2312.15148): models are mixed by their cosine similarity. Needs NumPy arrays only.

Client i has the model w_i, a row of numbers. Before a round every client's next model is a weighted mean of the models
that are most similar to its own:

    s_ij = cos(w_i, w_j)
    δ    = p-quantile of all n² elements of S, the diagonal included
    u_i  = Σ_{j: s_ij > δ} s_ij·w_j / Σ_{j: s_ij > δ} s_ij                                         (eq. 4)

In addition to the paper: a client's own model is always in the sum, so that no sum is empty (s_ii > δ is false if
δ = 1, as with models that are all equal); a negative similarity has the weight 0; with `alpha` below 1 the next model
is (1 − α)·w_i + α·u_i.

Every function takes the models as an array (n, P) or as an object that returns blocks of columns (`Models`), so that n
models can be in a file that is larger than memory. In memory are then a few blocks of columns of all models for each
core, and n² numbers. Call `update_gram` for the clients that have reported, then `cosine`, then `mix_rows`.
"""

from tepal.strategies.mixing.columns import Models
from tepal.strategies.mixing.gram import gram_rows, update_gram
from tepal.strategies.mixing.mixtures import mix, mix_rows, weighted_rows
from tepal.strategies.mixing.weights import cosine, mixing_weights, threshold

__all__ = [
    "Models", "cosine", "gram_rows", "mix", "mix_rows", "mixing_weights", "threshold", "update_gram", "weighted_rows",
]  # fmt: skip
