"""The stores of W&B offline and of trackio, read independently of the product."""

import json
import sqlite3
import subprocess
import sys
from typing import Any

from lib.runs.run_dir import RunDir

# Metric → iteration → value; and the configuration.
History = tuple[dict[str, dict[int, float]], dict[str, Any]]


def wandb_history(run: RunDir) -> History:
    """Return history and configuration of an offline run, read with wandb's reader."""
    (path,) = run.trackers.glob("wandb/offline-run-*/*.wandb")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(path.parent)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    history: dict[str, dict[int, float]] = {}
    config: dict[str, Any] = {}
    for record in map(json.loads, text.splitlines()):
        found = record.get("run", record).get("config", {}).get("update", {})
        config |= found
        items = record.get("history", {}).get("item", {})
        for name, value in items.items():
            if not name.startswith("_"):
                history.setdefault(name, {})[items["_step"]] = value
    return history, config


def trackio_history(run: RunDir) -> History:
    """Return history and configuration from trackio's database."""
    (path,) = (run.path.parent / "trackio").glob("*.db")
    history: dict[str, dict[int, float]] = {}
    with sqlite3.connect(path) as base:
        for step, text in base.execute("select step, metrics from metrics"):
            for name, value in json.loads(text).items():
                history.setdefault(name, {})[step] = value
        ((text,),) = base.execute("select config from configs")
    return history, json.loads(text)
