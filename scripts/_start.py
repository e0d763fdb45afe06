"""Imported first by every script: ends with what to type where the tree is not installed.

Ctrl-C while the rest is imported, seconds of them torch, ends at once, in the line that lib.cli writes.
Raised there it would be a long traceback, or be swallowed by an import that catches everything.
Standard library only, and readable by an older Python.
"""

import os
import shlex
import signal
import sys
from importlib.util import find_spec

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def advice() -> str:
    """What to type instead; "" where this interpreter finds this tree's ``lib``."""
    found = find_spec("lib")
    origin = os.path.realpath(found.origin) if found and found.origin else ""
    if sys.version_info >= (3, 11) and origin == os.path.join(ROOT, "lib", "__init__.py"):
        return ""
    given = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    if origin in [os.path.realpath(os.path.join(path, "lib", "__init__.py")) for path in given]:
        return "PYTHONPATH holds another lib: unset PYTHONPATH"
    python = os.path.join(ROOT, ".venv", "bin", "python")
    if os.access(python, os.X_OK) and not os.path.samefile(sys.prefix, os.path.join(ROOT, ".venv")):
        return "type " + " ".join(map(shlex.quote, [python, *sys.argv]))
    return "type make -C " + shlex.quote(ROOT) + " setup"


def interrupted(number: int, frame: object) -> None:
    """Until ``lib.cli.run`` takes over."""
    os.write(2, b"EXIT    code 130\n")
    os._exit(130)


# A worker process imports its parent's script too, and deals with signals in its own way.
WORKER = "multiprocessing" in sys.modules
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and not WORKER:
    signal.signal(signal.SIGINT, interrupted)
if advice():
    sys.stderr.write("ERROR   %s does not find this tree: %s\n" % (sys.executable, advice()))
    sys.exit(2)
