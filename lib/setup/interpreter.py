"""Comparison of the running interpreter's packages with the requirements."""

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
    """Missing and differing packages as (requirement, installed version); "" if not installed."""

    lacking: Sequence[tuple[Requirement, str]]
    # In range, but not the tested version.
    differing: Sequence[tuple[Requirement, str]]
    # Whether ``import lib`` from any folder imports this tree.
    installed: bool

    @property
    def complete(self) -> bool:
        """Return whether every requirement is met."""
        return self.installed and not self.lacking

    def describe_lacking(self) -> str:
        """Return the missing packages as text."""
        words = [
            f"{r.name} {r.operator} {r.bound} (has {version})" if version else r.name
            for r, version in self.lacking
        ]
        if not self.installed:
            words.append("this tree (editable install)")
        return ", ".join(words)

    def describe_differing(self) -> str:
        """Return the packages in range but not at the tested version as text, "" if none."""
        return ", ".join(f"{r.name} {version} (tested: {r.pin})" for r, version in self.differing)


def look(root: Path, requirements: Sequence[Requirement], path: Sequence[str]) -> Findings:
    """Compare the packages in the folders of ``path`` with ``requirements`` and ``root``."""
    lacking, differing = [], []
    for requirement in requirements:
        version = _version(requirement.name, path)
        if not requirement.accepts(version):
            lacking.append((requirement, version))
        elif not requirement.is_pin(version):
            differing.append((requirement, version))
    return Findings(lacking, differing, _is_installed(root, path))


def import_path() -> list[str]:
    """Return the folders of installed packages: sys.path without the tree itself."""
    return [folder for folder in sys.path if Path(folder).resolve() != ROOT]


def install_command(root: Path, findings: Findings) -> str:
    """Return the one command that installs the missing packages into the running interpreter."""
    packages = [str(requirement) for requirement, _ in findings.lacking]
    words = [*packages, "-e", str(root)]
    if find_spec("pip") is None and shutil.which("uv"):
        return shlex.join(["uv", "pip", "install", "--python", sys.executable, *words])
    return shlex.join([sys.executable, "-m", "pip", "install", *words])


def _version(name: str, path: Sequence[str]) -> str:
    return next((package.version for package in distributions(name=name, path=list(path))), "")


def _is_installed(root: Path, path: Sequence[str]) -> bool:
    """Return whether the installed package PROJECT is an editable install of ``root``."""
    for package in distributions(name=PROJECT, path=list(path)):
        origin = package.read_text("direct_url.json")
        if origin is None:
            return False
        folder = unquote(urlsplit(json.loads(origin)["url"]).path)
        return Path(folder).resolve() == root.resolve()
    return False
