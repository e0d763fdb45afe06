"""The text files of this tree, its parsed modules, and the words of its Makefile."""

import ast
import re
import subprocess
from functools import cache

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


def makefile_targets(makefile):
    """Return the explicit targets, without pattern rules and generated targets."""
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", makefile, re.MULTILINE))


def makefile_variables(makefile):
    """Return the variables that a user may set."""
    return set(" ".join(re.findall(r"^SETTINGS [:+]= (.*)$", makefile, re.MULTILINE)).split())
