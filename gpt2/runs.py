"""``resolved_config.yaml``: the complete configuration stored in each run directory."""

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
    """Write all symbol values, the run's identity, and the source of each non-default value.

    The file contains JSON, which is valid YAML and needs no extra package. Raises ConfigError,
    without changing any file, if the directory belongs to a different run.
    """
    if (recorded := _hash8(run)) not in (None, config.hash8):
        what = f"directory belongs to a different run (expected {config.hash8}, got {recorded})"
        advice = "move the directory aside, then type: make"
        raise ConfigError(Problem(what, str(run.path), advice, code="run.foreign-directory"))
    record = {
        "schema_version": SCHEMA_VERSION,
        "hash8": config.hash8,
        "identity": config.identity(),
        "settings": dict(settings or {}),
        "symbols": dict(config.values),
    }
    write_json(run.resolved_config, record)


def _hash8(run: RunDir) -> str | None:
    """Return the hash of the run in the directory; None if there is no readable record."""
    try:
        return str(json.loads(run.resolved_config.read_text())["hash8"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def read_settings(run: RunDir) -> dict[str, Any]:
    """Return the non-default settings of a run.

    ``overrides`` maps symbols to values and sources; ``defconfig`` lists the sources that are files
    of this tree.
    """
    settings = json.loads(run.resolved_config.read_text())["settings"]
    files = {s["where"].partition(":")[0] for s in settings.values() if s["label"] in _SHIPPED}
    return {"defconfig": sorted(files), "overrides": settings}


def read_resolved_config(run: RunDir) -> Config:
    """Load the configuration of a run directory.

    Raises ConfigError if the file is missing or unreadable, or if this code derives a different
    identity from the symbols than the code that wrote the file.
    """
    where = str(run.resolved_config)
    try:
        record = json.loads(run.resolved_config.read_text())
        symbols, written = record["symbols"], record["hash8"]
    except (OSError, ValueError, KeyError) as error:
        what = f"not a resolved configuration: {error}"
        raise ConfigError(Problem(what, where, code="run.damaged")) from None
    config = Config.from_values(symbols)
    if config.hash8 != written:
        raise ConfigError(
            Problem(
                f"made by other code (recorded identity {written}, now {config.hash8})",
                where,
                "type: make, to plan the runs of this code",
                code="run.other-code",
            )
        )
    return config
