"""What travels between server and clients: which entries, what a client already holds, and how they are packed.

The client's half is a Flower mod, `partial_exchange`; the server's half, `Sender`, is used by every strategy of
`tepal.strategies`. Nothing here needs torch.
"""

from tepal.exchange.encodings import Encoding
from tepal.exchange.layout import Entry, Layout, Names, RawTensor
from tepal.exchange.mod import PartialExchange, Received, partial_exchange, received
from tepal.exchange.plan import MODEL, Plan, Reply, Tree
from tepal.exchange.sender import BadReply, Missing, Sender, Traffic

__all__ = [
    "MODEL",
    "BadReply",
    "Encoding",
    "Entry",
    "Layout",
    "Missing",
    "Names",
    "PartialExchange",
    "Plan",
    "RawTensor",
    "Received",
    "Reply",
    "Sender",
    "Traffic",
    "Tree",
    "partial_exchange",
    "received",
]
