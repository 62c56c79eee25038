"""The messages between server and clients: plans, manifests, packed parts, and the client's cache.

The client's half is a Flower mod, `partial_exchange`; the server's half, `Sender`, is used by every strategy of
`tepal.strategies`. This package needs no torch.
"""

from tepal.exchange.bounds import BadReply
from tepal.exchange.encodings import Encoding
from tepal.exchange.layout import Entry, Layout, Names, RawTensor
from tepal.exchange.mod import PartialExchange, Received, partial_exchange, received
from tepal.exchange.plan import MODEL, Outgoing, Plan, Reply, Tree
from tepal.exchange.sender import ClientRecord, Exchange, Missing, Sender
from tepal.exchange.traffic import Traffic

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
