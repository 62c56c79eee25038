"""What the unit tests share: they may fork beside threads that an earlier test has left in gRPC."""

import os

# With its handlers of fork, gRPC ends such a child now and then ("Check failed: next_worker->state == KICKED").
os.environ["GRPC_ENABLE_FORK_SUPPORT"] = "0"
