"""What a model is made of: its entries, and the blocks that the methods freeze, select and exchange.

FedFrozen (arXiv 2605.06446) divides a model in two: `query_key`, the weights and biases of all query and key
projections of every attention module (self- and cross-attention), and `value`, everything else. Selective layer
fine-tuning (arXiv 2408.15600) divides it into transformer blocks (`layers`), `embedding` and `head`.

Blocks are found by family and proved. `RULES` lists how attention modules name their projections; what is found is
then held against what the model's configuration says about the number of attention modules and about their shapes,
and whatever still looks like a query or key projection afterwards is an error. No model library is imported here: a
family is told by attribute and class names. To add one is a line in `RULES`; a model of one's own needs no line:

    class MyAttention(nn.Module):
        tepal_projections = {"wqkv": "qkv"}      # attribute → which of q, k, v it holds, stacked in this order
"""

from tepal.models.blocks.errors import BlocksError
from tepal.models.blocks.find import Blocks, find_blocks
from tepal.models.blocks.layout import canonical_state, layout_of
from tepal.models.blocks.rules import RULES, Rule

__all__ = ["RULES", "Blocks", "BlocksError", "Rule", "canonical_state", "find_blocks", "layout_of"]
