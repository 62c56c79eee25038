"""Flower from inside: what Tepal changes in processes of Flower 1.39, and the names of Flower that are not public.

- `supernode.py`: Flower's own SuperNode, which looks for messages sooner.
- `worker.py`: runs the ClientApp: one process for each run, and a spare one that has imported torch already.
- `objects.py`: takes messages apart and puts them together, for the worker and for the server's grid.
- `patches.py`: the version that this is written for, and how its functions are replaced.

The worker must not import an installed `tepal`, because the app's bundle brings its own. Hence this folder's files
import each other relatively, and are started as a package of another name (`link.command`).
"""
