"""Installed packages as seen by the running interpreter; works without pip, which uv omits."""

import hashlib
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

# Folder NAME-VERSION.dist-info, or NAME-VERSION-pyX.Y.egg-info of old setuptools.
_INFO = re.compile(r"(?P<name>[^-]+(?:-[^0-9][^-]*)*)-(?P<version>[^-]+)(?:-py[\d.]+)?")


def installed(path: Sequence[str] | None = None) -> dict[str, str]:
    """Return name → version, sorted by name, of the packages in ``path`` (default sys.path).

    Folder names are parsed, which is ten times faster than reading package metadata. If a name
    occurs several times, the first one counts, as for imports.
    """
    packages: dict[str, str] = {}
    for entry in filter(None, sys.path if path is None else path):
        for kind in ("dist-info", "egg-info"):
            for folder in Path(entry).glob(f"*.{kind}"):
                if match := _INFO.fullmatch(folder.stem):
                    packages.setdefault(normal(match["name"]), match["version"])
    return dict(sorted(packages.items()))


def normal(name: str) -> str:
    """Return the normalized package name (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def listing(packages: Mapping[str, str]) -> str:
    """Return one line ``name==version`` per package, sorted by name (packages.txt)."""
    return "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))


def digest(packages: Mapping[str, str]) -> str:
    """Return the SHA-256 of ``listing``."""
    return hashlib.sha256(listing(packages).encode()).hexdigest()
