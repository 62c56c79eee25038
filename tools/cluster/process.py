"""The process of a job on its machine: `python -m tepal.tools.cluster.process FOLDER PARENT`.

FOLDER has `job.json`: the function to call, "module:function", and its arguments. It is called with FOLDER and the
arguments, and what it returns, or why it failed, is written to `result/result.json`. Then the process waits for a line
on its standard input, and does the job that FOLDER has by then: what was imported is there already. It ends with its
standard input, and if PARENT has ended, the process of the job's actor.
"""

from __future__ import annotations

import json
import os
import pkgutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

from tepal.host.files import replacing
from tepal.host.superlink import RunError
from tepal.tools.cluster.machine import RESULT_FILE

JOB = "job.json"
"""The file of a job, in the job's folder."""


def main() -> None:
    folder = Path(sys.argv[1])
    threading.Thread(target=_end_with_parent, args=[int(sys.argv[2])], daemon=True).start()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with os.fdopen(os.dup(0)) as requests, open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)  # jobs, and what they start, must not read the requests
        _do_job(folder)
        for _ in requests:
            _do_job(folder)


def _do_job(folder: Path) -> None:
    job = json.loads((folder / JOB).read_text(encoding="utf-8"))
    try:
        result = {"value": pkgutil.resolve_name(job["function"])(folder, **job["arguments"])}
    except Exception as error:
        traceback.print_exc()
        result = {"error": error.reason if isinstance(error, RunError) else str(error), "kind": type(error).__name__}
    sys.stdout.flush()
    file = folder / RESULT_FILE
    file.parent.mkdir(exist_ok=True)
    with replacing(file) as partial:
        partial.write_text(json.dumps(result), encoding="utf-8")


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os.killpg(0, signal.SIGKILL)  # with all that it has started; what left the group has a guard


if __name__ == "__main__":
    main()
