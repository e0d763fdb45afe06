"""Where each value of a ``.config`` came from, kept beside it in ``.config.origins`` (JSON)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from lib.errors import ConfigError, Problem
from lib.files import write_json
from lib.kconfig.layers import Resolution, as_text

SCHEMA_VERSION = 1


class Record(TypedDict):
    """The value as text, the label of its layer ("default" for none) and the place it stands at."""

    value: str
    label: str
    where: str


def origins_path(config: Path) -> Path:
    """The origins of the configuration file ``config``."""
    return config.with_name(config.name + ".origins")


def write_origins(config: Path, resolution: Resolution, defaults: Mapping[str, str]) -> None:
    """Record the origin of every value; ``defaults`` tells where each item is defined."""
    records: dict[str, Record] = {}
    for name, value in resolution.values.items():
        origin = resolution.origins[name]
        label, where = (origin.label, origin.where) if origin else ("default", defaults[name])
        records[name] = Record(value=as_text(value), label=label, where=where)
    write_json(origins_path(config), {"schema_version": SCHEMA_VERSION, "origins": records})


def read_origins(config: Path) -> dict[str, Record] | None:
    """The recorded origins by name; None when nobody recorded any. ConfigError if damaged."""
    path = origins_path(config)
    if not path.exists():
        return None
    try:
        document = json.loads(path.read_bytes())
        return {
            name: Record(value=r["value"], label=r["label"], where=r["where"])
            for name, r in document["origins"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(Problem("damaged", str(path), f"rm {path}")) from None
