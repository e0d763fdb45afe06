"""The text files of this tree, its parsed modules, and the words of make."""

import ast
import re
import subprocess
from functools import cache

from lib.commands import TARGETS, VARIABLES
from lib.project import ROOT


@cache
def texts():
    """Return path → text of each UTF-8 file that git tracks or could add, without symlinks."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "-co", "--exclude-standard"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    paths = (ROOT / name for name in sorted(set(listed.split("\0")) - {""}))
    files = [path for path in paths if path.is_file() and not path.is_symlink()]
    contents = {str(path.relative_to(ROOT)): path.read_bytes() for path in files}
    return {name: data.decode() for name, data in contents.items() if b"\0" not in data}


@cache
def modules():
    """Return the parsed product modules by path: lib, gpt2 and scripts."""
    chosen = (p for p in texts() if re.match(r"(lib|gpt2|scripts)/.*\.py$", p))
    return {path: ast.parse(texts()[path]) for path in chosen}


@cache
def module_paths():
    """Return name → path of each product module."""
    return {module_name(path): path for path in modules()}


def module_name(path):
    """Return the dotted name of a module."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


# The targets of make, without generated ones and those of patterns, and the variables that users set.
MAKE_TARGETS = {name for name in TARGETS if name != "defconfig"}
MAKE_VARIABLES = {name for name in VARIABLES if name.isupper()}
