"""Explicit settings of a run's configuration: every non-default value with its source."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from lib.binding import Value
from lib.kconfig.dotconfig import read_config
from lib.kconfig.layers import as_text
from lib.kconfig.origins import read_origins


class Setting(TypedDict):
    """Value, kind of source, and location in that source.

    ``label`` is defconfig, fragment, command line or menuconfig; "edited" for a line of ``.config``
    that was edited by hand; "plan" for a value set by a step, a seed or a sweep.
    """

    value: Value
    label: str
    where: str


def settings(config: Path, values: Mapping[str, Value], run: str) -> dict[str, Setting]:
    """Return the non-default settings in ``values``, a run planned from the file ``config``.

    ``run`` is the name of the run in the plan. Without recorded origins, every line of the file
    counts as edited. Raises ConfigError if a file is damaged.
    """
    records = read_origins(config) or {}
    lines = {a.name: a.value for a in read_config(config).assignments}
    explicit = {}
    for name in sorted((records.keys() | lines.keys()) & values.keys()):
        value, record, line = values[name], records.get(name), _line(lines, name, values[name])
        if line is None and (record is None or record["value"] == as_text(value)):
            # The symbol is unavailable in the file and in the run.
            continue
        if line != as_text(value):
            explicit[name] = Setting(value=value, label="plan", where=run)
        elif record is None or record["value"] != line:
            explicit[name] = Setting(value=value, label="edited", where=config.name)
        elif record["label"] != "default":
            explicit[name] = Setting(value=value, label=record["label"], where=record["where"])
    return explicit


def _line(lines: Mapping[str, str], name: str, value: Value) -> str | None:
    """Return the file's value of a symbol, or ``value`` if the file selects this choice member."""
    member = f"{name}_{value}".upper()
    return as_text(value) if lines.get(member) == "y" else lines.get(name)
