"""What the running interpreter has and lacks."""

import json
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

from lib.project import ROOT
from lib.setup.requirements import Requirement

PROJECT = "kablate"


@dataclass(frozen=True)
class Findings:
    """Each tuple holds (requirement, installed version); "" where the package is absent."""

    lacking: Sequence[tuple[Requirement, str]]
    # In range, but not the tested version.
    differing: Sequence[tuple[Requirement, str]]
    # Whether ``import lib`` from any folder finds this tree.
    installed: bool

    @property
    def complete(self) -> bool:
        """Whether everything is there."""
        return self.installed and not self.lacking

    def describe_lacking(self) -> str:
        """What is missing, in words."""
        words = [
            f"{r.name} {r.operator} {r.bound} (has {version})" if version else r.name
            for r, version in self.lacking
        ]
        if not self.installed:
            words.append("this tree (editable install)")
        return ", ".join(words)

    def describe_differing(self) -> str:
        """What is in range without being the tested version, in words; "" for nothing."""
        return ", ".join(f"{r.name} {version} (tested: {r.pin})" for r, version in self.differing)


def look(root: Path, requirements: Sequence[Requirement], path: Sequence[str]) -> Findings:
    """Compare what is installed in the folders of ``path`` with ``requirements`` and ``root``."""
    lacking, differing = [], []
    for requirement in requirements:
        version = _version(requirement.name, path)
        if not requirement.accepts(version):
            lacking.append((requirement, version))
        elif not requirement.is_pin(version):
            differing.append((requirement, version))
    return Findings(lacking, differing, _is_installed(root, path))


def import_path() -> list[str]:
    """Where packages are installed. The tree itself, which ``python -m`` puts first, has none."""
    return [folder for folder in sys.path if Path(folder).resolve() != ROOT]


def install_command(root: Path, findings: Findings) -> str:
    """The one command that installs what is missing into the running interpreter."""
    packages = [str(requirement) for requirement, _ in findings.lacking]
    words = [*packages, "-e", str(root)]
    if find_spec("pip") is None and shutil.which("uv"):
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *words])
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def _version(name: str, path: Sequence[str]) -> str:
    return next((found.version for found in distributions(name=name, path=list(path))), "")


def _is_installed(root: Path, path: Sequence[str]) -> bool:
    """Whether the first installed project of our name is an editable install of ``root``."""
    for found in distributions(name=PROJECT, path=list(path)):
        origin = found.read_text("direct_url.json")
        if origin is None:
            return False
        folder = unquote(urlsplit(json.loads(origin)["url"]).path)
        return Path(folder).resolve() == root.resolve()
    return False
