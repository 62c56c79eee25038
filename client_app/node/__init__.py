"""The warm node: Flower's SuperNode, and a process that keeps the ClientApp, torch and data in memory.

`node.py` is the parent process. It starts the SuperNode and the workers (`child.py`, `tepal.host.flower`), restarts
those that died, and answers `status` and `drain` (`service.py`). `executor.py` takes tasks from the SuperNode.
"""
