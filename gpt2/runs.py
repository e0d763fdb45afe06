"""``resolved_config.yaml``: the symbols that made a run, so that its directory describes itself."""

import json
from collections.abc import Mapping
from typing import Any

from gpt2.config import Config
from lib.errors import ConfigError, Problem
from lib.files import write_json
from lib.kconfig.settings import Setting
from lib.rundir import RunDir

SCHEMA_VERSION = 2
_SHIPPED = ("defconfig", "fragment")


def write_resolved_config(
    run: RunDir, config: Config, settings: Mapping[str, Setting] | None = None
) -> None:
    """Write every symbol's value, the identity that follows from them, and who set them.

    JSON is valid YAML, and writing it needs no further package. ConfigError where the folder holds
    another run, of which nothing is touched.
    """
    if (there := _hash8(run)) not in (None, config.hash8):
        what = f"holds another run: its hash is {there}, this one's {config.hash8}"
        raise ConfigError(Problem(what, str(run.path), "move the folder aside, then type: make"))
    record = {
        "schema_version": SCHEMA_VERSION,
        "hash8": config.hash8,
        "identity": config.identity(),
        "settings": dict(settings or {}),
        "symbols": dict(config.values),
    }
    write_json(run.resolved_config, record)


def _hash8(run: RunDir) -> str | None:
    """The hash of the run that the folder holds; None where it holds none that can be read."""
    try:
        return str(json.loads(run.resolved_config.read_text())["hash8"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_settings(run: RunDir) -> dict[str, Any]:
    """``overrides``: the values that are no defaults, each with its source; and ``defconfig``: the
    files of the tree among the sources."""
    settings = json.loads(run.resolved_config.read_text())["settings"]
    files = {s["where"].partition(":")[0] for s in settings.values() if s["label"] in _SHIPPED}
    return {"defconfig": sorted(files), "overrides": settings}


def read_resolved_config(run: RunDir) -> Config:
    """The configuration of a run directory.

    ConfigError when the file is missing, unreadable, or means another run to this code than to the
    code that wrote it.
    """
    where = str(run.resolved_config)
    try:
        record = json.loads(run.resolved_config.read_text())
        symbols, written = record["symbols"], record["hash8"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(Problem(f"not a resolved configuration: {error}", where)) from None
    config = Config.from_values(symbols)
    if config.hash8 != written:
        raise ConfigError(
            Problem(
                f"made by other code: its identity was {written} and is {config.hash8} now",
                where,
                "type: make, which plans the runs of this code",
            )
        )
    return config
