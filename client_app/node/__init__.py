"""The warm node: Flower's SuperNode, and a process that keeps the ClientApp, torch and data in memory.

`node.py` is the parent: it starts the SuperNode and the worker (`tepal.host.flower`), takes tasks from the SuperNode
(`executor.py`), reports when one of them died, answers `status` and `drain` (`service.py`), and ends all properly.
"""
