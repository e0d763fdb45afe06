"""Drift since a run was made: source files, torch version and device; imports no torch."""

import ast
import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lib.repro.source import changed_since
from lib.rundir import RunDir


def changes_since(run: RunDir, device: str) -> list[str]:
    """Return source files, torch version and device model that differ from the manifest of ``run``.

    ``device`` is the device model that would be used now. Returns [] for a run that never started.
    """
    try:
        recorded = json.loads(run.manifest.read_text())["origin"]
        return differences(recorded, {"torch": installed_torch(), "device": device})
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        return [f"{run.manifest.name}, unreadable"]


def differences(recorded: Mapping[str, Any], now: Mapping[str, str]) -> list[str]:
    """Return torch version, device model and source files of ``recorded`` that changed."""
    facts = [
        f"{name} (was {recorded[name]}, is {now[name]})"
        for name in ("torch", "device")
        if recorded[name] != now[name]
    ]
    return facts + changed_since(recorded["sources"])


def installed_torch() -> str:
    """Return ``torch.__version__`` without importing torch, or "none" if torch is not installed.

    The package metadata may lack the local version (after ``+``) that names the build.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return "none"
    tree = ast.parse(Path(spec.origin).with_name("version.py").read_text())
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == "__version__":
                return str(node.value.value)
    return "unknown"
