"""A Flower app must have a ClientApp; nothing of this one is ever run, because the nodes are stubs."""

from flwr.clientapp import ClientApp

app = ClientApp()
