"""``resolved_config.yaml``: the symbols that made a run, so that its directory describes itself."""

import json

from gpt2.config import Config
from lib.errors import ConfigError, Problem
from lib.files import write_json
from lib.rundir import RunDir

SCHEMA_VERSION = 1


def write_resolved_config(run: RunDir, config: Config) -> None:
    """Write every symbol's value and the identity that follows from them.

    JSON is valid YAML, and writing it needs no further package.
    """
    record = {
        "schema_version": SCHEMA_VERSION,
        "hash8": config.hash8,
        "identity": config.identity(),
        "symbols": dict(config.values),
    }
    write_json(run.resolved_config, record)


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
