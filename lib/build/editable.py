"""PEP 660 build backend: an editable install is one ``.pth`` line that points to this tree.

Standard library only, since others are downloaded for every build, or write into the tree. A regular
install is rejected: Kconfig files, defconfigs and scripts are used in place.
"""

import base64
import hashlib
import os
import tomllib
import zipfile
from pathlib import Path
from typing import Any, NoReturn

_TAG = "py3-none-any"


def build_editable(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> str:
    """Write the wheel and return its name; the tree is the working directory (PEP 660)."""
    root = Path.cwd()
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    stem = f"{project['name']}-{project['version']}"
    generator = "Wheel-Version: 1.0\nGenerator: kablate\nRoot-Is-Purelib: true\n"
    files = {
        f"{project['name']}.pth": os.fsencode(root) + b"\n",
        f"{stem}.dist-info/METADATA": _metadata(project).encode(),
        f"{stem}.dist-info/WHEEL": f"{generator}Tag: {_TAG}\n".encode(),
        f"{stem}.dist-info/entry_points.txt": _entry_points(project.get("scripts", {})).encode(),
    }
    record = f"{stem}.dist-info/RECORD"
    rows = [f"{name},{_hash(data)},{len(data)}" for name, data in files.items()]
    files[record] = "\n".join([*rows, f"{record},,", ""]).encode()
    wheel = f"{stem}-{_TAG}.whl"
    with zipfile.ZipFile(Path(wheel_directory, wheel), "w") as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return wheel


def build_wheel(
    wheel_directory: str,
    config_settings: dict[str, Any] | None = None,
    metadata_directory: str | None = None,
) -> NoReturn:
    """Reject a regular install with the command that works."""
    raise SystemExit(f"kablate runs from its tree: pip install -e {Path.cwd()}")


def _metadata(project: dict[str, Any]) -> str:
    extras = project["optional-dependencies"]
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {project['name']}",
        f"Version: {project['version']}",
        f"Summary: {project['description']}",
        f"Requires-Python: {project['requires-python']}",
        *(f"Requires-Dist: {dependency}" for dependency in project["dependencies"]),
        *(f"Provides-Extra: {name}" for name in extras),
        *(f'Requires-Dist: {p}; extra == "{name}"' for name, ps in extras.items() for p in ps),
    ]
    return "\n".join(lines) + "\n"


def _entry_points(scripts: dict[str, str]) -> str:
    return "\n".join(["[console_scripts]", *(f"{k} = {v}" for k, v in scripts.items()), ""])


def _hash(data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=")
    return f"sha256={digest.decode()}"
