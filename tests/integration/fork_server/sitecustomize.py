"""Has a Python program run as a fork of a process that has imported the large libraries already.

Python imports this file at the start of programs whose environment is of `forks.forked`. They are what they would be:
Flower's console scripts, `python -m` and `python -c`, with their arguments, environment, folder and open files, and
each imports the code of Flower and of Tepal. Only torch, gRPC and the like are there before. The process that was
started stays, with its pid, command line and environment: it hands signals on, ends with the status of its fork, and
takes the fork with it when it is killed.
"""

import ctypes
import json
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1


def _run_as_fork(address: str) -> None:
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(address)
    except OSError:
        return  # nobody is there: the program runs here
    if sys.argv[0] == "-c":  # a worker of a node, which asks the kernel to end with its parent: that is this one's
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    files = [number for number in range(256) if number != server.fileno() and _is_inherited(number)]
    program = json.dumps(
        {
            "kind": sys.argv[0],
            "what": sys.orig_argv[-len(sys.argv)],  # the script, the module or the code
            "arguments": sys.argv[1:],
            "safe_path": sys.flags.safe_path,
            "path": sys.path,
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "files": files,
            "parent": os.getppid(),
        }
    ).encode()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda got, _frame: server.sendall(bytes([got])))
    socket.send_fds(server, [len(program).to_bytes(4, "big")], files)
    server.sendall(program)
    for number in files:
        if number > 2:
            os.close(number)
    answer = server.recv(2, socket.MSG_WAITALL)
    if len(answer) < 2:  # the server is gone, and the fork with it
        os._exit(1)
    status = int.from_bytes(answer, "big", signed=True)
    if status < 0:  # by a signal
        if -status != signal.SIGKILL:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def _is_inherited(number: int) -> bool:
    try:
        return os.get_inheritable(number)
    except OSError:
        return False


if sys.argv[0] not in ("", "-") and "TEPAL_TEST_FORKS" in os.environ:
    _run_as_fork(os.environ["TEPAL_TEST_FORKS"])
