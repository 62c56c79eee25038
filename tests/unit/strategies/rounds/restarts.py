"""A grid in which the node of one client can be restarted."""

from flwr.proto.node_pb2 import NodeInfo

from tepal.strategies.in_process import InProcessGrid


class RestartingGrid(InProcessGrid):
    """Setting `started` to another text restarts the nodes with the registered name `of`."""

    started = ""

    def __init__(self, *args, of, **kwargs):
        super().__init__(*args, **kwargs)
        self.of = of

    def get_nodes(self):
        return [
            NodeInfo(node_id=number, name=node.name, last_activated_at=self.started if node.name == self.of else "")
            for number, node in self.nodes.items()
        ]
