"""What travels between server and clients: which entries, what a client already holds, and how they are packed.

The client's half is a Flower mod, `partial_exchange`; the server's half, `Sender`, is used by every strategy of
`tepal.strategies`. Nothing here needs torch.
"""

from tepal.exchange.encodings import Encoding
from tepal.exchange.layout import Entry, Layout, Names, RawTensor
from tepal.exchange.mod import PartialExchange, Received, partial_exchange, received
from tepal.exchange.plan import MODEL, Outgoing, Plan, Reply, Tree
from tepal.exchange.sender import BadReply, ClientRecord, Exchange, Missing, Sender, Traffic

__all__ = [
    "MODEL",
    "BadReply",
    "ClientRecord",
    "Encoding",
    "Entry",
    "Exchange",
    "Layout",
    "Missing",
    "Names",
    "Outgoing",
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
