"""The ClientApp that a Flower app must have; it is never run, because the nodes are stubs."""

from flwr.clientapp import ClientApp

app = ClientApp()
