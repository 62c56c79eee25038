"""The warm node: Flower's SuperNode, and beside it a process that keeps the ClientApp, torch and data in memory.

Three kinds of processes, each a file:

- `node.py`: the parent. It starts the others, takes tasks from the SuperNode, says when one died, answers `status` and
  `drain`, and ends everything properly.
- `supernode.py`: Flower's own SuperNode, which looks for messages sooner.
- `worker.py`: runs the ClientApp: one process for each run, and a spare one that has imported torch already.

`objects.py` takes messages apart and puts them together, for the worker and for the server's grid.

The worker must not import an installed `tepal`, because the app's bundle brings its own. Hence this folder's files
import each other relatively, and are started as a package of another name (`link.command`). What they use of Flower is
not public: `flower.py` says of which version.
"""
