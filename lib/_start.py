"""Startup check of every command line, imported first: exits with advice if the tree is not installed.

Ctrl-C during the other imports (torch takes seconds) exits at once with the same line as lib.console.
A KeyboardInterrupt raised there would print a long traceback, or be swallowed by an import that
catches every exception. Uses only the standard library and syntax of older Python versions.
"""

import os
import shlex
import signal
import sys
from importlib.machinery import PathFinder

ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def advice() -> str:
    """Return the command to type instead; "" if this interpreter imports ``lib`` of this tree."""
    if (3, 11) <= sys.version_info < (3, 14):
        # Without the folder of the script or of python -m, which the processes of runs do not search.
        spec = PathFinder.find_spec("lib", sys.path if sys.flags.safe_path else sys.path[1:])
        origin = os.path.realpath(spec.origin) if spec and spec.origin else ""
        if origin == os.path.join(ROOT, "lib", "__init__.py"):
            return ""
        paths = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
        if origin in [os.path.realpath(os.path.join(path, "lib", "__init__.py")) for path in paths]:
            return "PYTHONPATH contains another lib: unset PYTHONPATH"
    python = os.path.join(ROOT, ".venv", "bin", "python")
    if os.access(python, os.X_OK) and not os.path.samefile(sys.prefix, os.path.join(ROOT, ".venv")):
        script = (
            ["-m", "lib.kablate"] if os.path.dirname(sys.argv[0]).endswith("lib") else sys.argv[:1]
        )
        return "type " + " ".join(map(shlex.quote, [python, *script, *sys.argv[1:]]))
    return "type: make -C " + shlex.quote(ROOT) + " setup"


def interrupted(number: int, frame: object) -> None:
    """Handle SIGINT until ``lib.console.run_main`` installs its own handler."""
    os.write(2, b"EXIT    code 130\n")
    os._exit(130)


# A worker process imports its parent's script too, and installs its own signal handlers.
WORKER = "multiprocessing" in sys.modules
if signal.getsignal(signal.SIGINT) is signal.default_int_handler and not WORKER:
    signal.signal(signal.SIGINT, interrupted)
if advice():
    sys.stderr.write("ERROR   %s cannot import this tree: %s\n" % (sys.executable, advice()))
    sys.exit(2)
