"""A client's secret, by which it keeps its name for a run when its key is not registered.

    <root>/secret       32 random bytes, as hexadecimal digits; only their owner can read the file

Of these a client derives one secret for each run and name, and sends it when it introduces itself. The server remembers
its digest: another node that introduces itself under the same name does not have the secret.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

from tepal.host.files import replacing

LENGTH = 64
"""Characters of a secret."""


def own_secret(path: Path, experiment: str, client: str) -> str:
    """The secret of a client in an experiment, from the file at `path`, which is made if it does not exist.

    Several processes agree on the first one's file. Raises OSError.
    """
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, durable=True, overwrite=False) as partial:
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w", encoding="ascii") as file:
                file.write(os.urandom(LENGTH // 2).hex())
    stored = path.read_text(encoding="ascii", errors="replace").strip()
    if len(stored) != LENGTH:
        raise OSError(f"{path} is damaged: it has {len(stored)} characters and not {LENGTH}")
    return hashlib.sha256(repr((stored, experiment, client)).encode()).hexdigest()


def proof_of(secret: str) -> str:
    """What the server remembers of a secret, hexadecimal; "" for no secret."""
    return hashlib.sha256(secret.encode()).hexdigest() if secret else ""
