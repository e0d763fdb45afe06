"""Imported first by every script: ends with what to type where the tree is not installed.

Ctrl-C while the rest is being imported, some seconds of them torch, ends in one line as it does later.
Standard library only, and readable by an older Python.
"""

import os
import shlex
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


def interrupted(kind, error, trace):
    """As lib.cli does; Python itself then ends by the signal, which a shell calls 130."""
    if issubclass(kind, KeyboardInterrupt):
        sys.stderr.write("EXIT    code 130\n")
    else:
        sys.__excepthook__(kind, error, trace)


sys.excepthook = interrupted
if advice():
    sys.stderr.write("ERROR   %s does not find this tree: %s\n" % (sys.executable, advice()))
    sys.exit(2)
