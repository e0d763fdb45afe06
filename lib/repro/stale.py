"""What has changed since a run was made, beyond its configuration; imports no torch."""

import ast
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.repro.source import changed_since
from lib.rundir import RunDir


def changes_since(run: RunDir, device: str) -> list[str]:
    """Source files, torch version and device model that are others now than in the manifest.

    ``device`` is the model that would compute now. Empty for a run that never began.
    """
    try:
        recorded = json.loads(run.manifest.read_text())["origin"]
        return differences(recorded, {"torch": installed_torch(), "device": device})
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        return [f"{run.manifest.name}, which cannot be read"]


def differences(recorded: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Torch version, device model and source files of ``recorded`` that are others now."""
    facts = [
        f"{name} (was {recorded[name]}, is {now[name]})"
        for name in ("torch", "device")
        if recorded[name] != now[name]
    ]
    return facts + changed_since(recorded["sources"])


def installed_torch() -> str:
    """``torch.__version__`` without importing torch; "none" where it is not installed.

    The package's metadata may lack the part after ``+`` that names the build.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        return "none"
    tree = ast.parse(Path(found.origin).with_name("version.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == "__version__":
                return str(node.value.value)
    return "unknown"
