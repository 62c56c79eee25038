"""Changes to Flower 1.39 and uses of its private names; no other folder has any.

- `supernode.py`: runs Flower's SuperNode with shorter polling intervals.
- `worker.py`: runs the ClientApp: one process for each run, and a spare one that has already imported torch.
- `refusals.py`: connections to the SuperLink that are refused or lost.
- `single.py`: small messages as one object.
- `runtime.py`: the Runtime API between SuperNode, executor and worker, over a Unix socket.
- `objects.py`: splits messages into objects and assembles them, for the worker and the server's grid.
- `patches.py`: the supported version, and how its functions are replaced.

The worker must not import an installed `tepal`, because the app's bundle brings its own. Hence this folder's files
import each other relatively, and are started as a package of another name (`link.command`).
"""
