"""Run a command in the command server instead of in a new interpreter: FOLDER COMMAND….

The command is a script or, after -m, a module, and its arguments, or -c and code, which has no time
limit. Its streams are those of this process, which passes signals on and ends as the command does.
"""

import json
import os
import resource
import select
import signal
import socket
import sys
from typing import TextIO

TIMEOUT_SECONDS = 120
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def ask(stream: TextIO, request: object) -> int:
    """Return the server's answer to a request."""
    print(json.dumps(request), file=stream, flush=True)
    return json.loads(stream.readline())


def main() -> int:
    """Run the command line."""
    folder, first, *arguments = sys.argv[1:]
    script = first not in ("-c", "-m")
    request = {
        "command": [os.path.abspath(first) if script else first, *arguments],
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "seconds": 0 if first == "-c" else TIMEOUT_SECONDS,
        "python": sys.executable,
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
        "in": os.devnull if script or "lib.kablate" in arguments else f"/proc/{os.getpid()}/fd/0",
        "out": f"/proc/{os.getpid()}/fd/1",
        "err": f"/proc/{os.getpid()}/fd/2",
    }
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{folder}/socket")
        stream = client.makefile("rw")
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        command = ask(stream, request)
        for number in SIGNALS:
            signal.signal(number, lambda number, frame: os.kill(command, number))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        # Until the server has waited for the process, its id is not used again.
        select.select([os.pidfd_open(command)], [], [])
        code = ask(stream, command)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
