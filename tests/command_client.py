"""Run a script in the command server instead of in a new interpreter: FOLDER SCRIPT [ARGUMENT …].

Its streams are those of this process, which ends as the script does.
"""

import json
import os
import resource
import select
import socket
import sys
from typing import TextIO

TIMEOUT_SECONDS = 120


def ask(stream: TextIO, request: object) -> int:
    """Return the server's answer to a request."""
    print(json.dumps(request), file=stream, flush=True)
    return json.loads(stream.readline())


def main() -> int:
    """Run the command line."""
    folder, script, *arguments = sys.argv[1:]
    request = {
        "command": [os.path.abspath(script), *arguments],
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "seconds": TIMEOUT_SECONDS,
        "file_size": resource.getrlimit(resource.RLIMIT_FSIZE),
        "out": f"/proc/{os.getpid()}/fd/1",
        "err": f"/proc/{os.getpid()}/fd/2",
    }
    with socket.socket(socket.AF_UNIX) as client:
        client.connect(f"{folder}/socket")
        stream = client.makefile("rw")
        command = ask(stream, request)
        # Until the server has waited for the process, its id is not used again.
        select.select([os.pidfd_open(command)], [], [])
        code = ask(stream, command)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main())
