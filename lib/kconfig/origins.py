"""Origins of the values of a ``.config``, stored beside it in ``.config.origins`` (JSON)."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from lib.errors import ConfigError, Problem
from lib.files import write_json
from lib.kconfig.layers import Resolution, as_text

SCHEMA_VERSION = 1


class Record(TypedDict):
    """Value as text, label of its layer ("default" for none), and location of the assignment."""

    value: str
    label: str
    where: str


def origins_path(config: Path) -> Path:
    """Return the path of the origins of the configuration file ``config``."""
    return config.with_name(config.name + ".origins")


def write_origins(config: Path, resolution: Resolution, defaults: Mapping[str, str]) -> None:
    """Write the origin of every value; ``defaults`` maps names to locations of definitions."""
    records: dict[str, Record] = {}
    for name, value in resolution.values.items():
        origin = resolution.origins[name]
        label, where = (origin.label, origin.where) if origin else ("default", defaults[name])
        records[name] = Record(value=as_text(value), label=label, where=where)
    write_json(origins_path(config), {"schema_version": SCHEMA_VERSION, "origins": records})


def read_origins(config: Path) -> dict[str, Record] | None:
    """Return the recorded origins by name, None if there is no record.

    Raises ConfigError if the record is damaged.
    """
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
        problem = Problem("damaged", str(path), f"rm {path}", code="config.damaged")
        raise ConfigError(problem) from None
