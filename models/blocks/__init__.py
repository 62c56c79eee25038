"""The entries of a model, and the blocks of entries that methods freeze, select and exchange.

FedFrozen (arXiv 2605.06446) divides a model in two: `query_key`, the weights and biases of all query and key
projections of every attention module (self- and cross-attention), and `value`, everything else. Selective layer
fine-tuning (arXiv 2408.15600) divides it into transformer blocks (`layers`), `embedding` and `head`.

Blocks are found by model family and verified. `RULES` lists how attention modules name their projections. The result is
compared with the model's configuration, which gives the number of attention modules and their shapes, and any other
entry that looks like a query or key projection is an error. No model library is imported here: a family is recognised
by attribute and class names. A new family is one line in `RULES`; a custom model declares its projections instead:

    class MyAttention(nn.Module):
        tepal_projections = {"wqkv": "qkv"}      # attribute → the roles stacked in it, in this order
"""

from tepal.models.blocks.errors import BlocksError
from tepal.models.blocks.find import Blocks, find_blocks
from tepal.models.blocks.layout import canonical_state, layout_of
from tepal.models.blocks.rules import RULES, Rule

__all__ = ["RULES", "Blocks", "BlocksError", "Rule", "canonical_state", "find_blocks", "layout_of"]
