"""Who set what in a run's configuration: all that is no default, each value with its source."""

from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from lib.binding import Value
from lib.kconfig.dotconfig import read_config
from lib.kconfig.layers import as_text
from lib.kconfig.origins import read_origins


class Setting(TypedDict):
    """The value, what kind of source it has, and where it stands there.

    ``label`` is defconfig, fragment, command line, menuconfig; "edited" for a line of ``.config``
    that somebody changed since; "plan" for what a step, a seed or a sweep changes.
    """

    value: Value
    label: str
    where: str


def settings(config: Path, values: Mapping[str, Value], run: str) -> dict[str, Setting]:
    """What in ``values``, a run planned from the file ``config``, is no default.

    ``run`` is how the run is called in the plan. Where nobody recorded origins beside the file,
    each of its lines counts as edited. ConfigError when a file is damaged.
    """
    records = read_origins(config) or {}
    lines = {a.name: a.value for a in read_config(config).assignments}
    found = {}
    for name in sorted((records.keys() | lines.keys()) & values.keys()):
        value, record, line = values[name], records.get(name), _line(lines, name, values[name])
        if line is None and (record is None or record["value"] == as_text(value)):
            # It means nothing in the file, nor in the run.
            continue
        if line != as_text(value):
            found[name] = Setting(value=value, label="plan", where=run)
        elif record is None or record["value"] != line:
            found[name] = Setting(value=value, label="edited", where=config.name)
        elif record["label"] != "default":
            found[name] = Setting(value=value, label=record["label"], where=record["where"])
    return found


def _line(lines: Mapping[str, str], name: str, value: Value) -> str | None:
    """What the file says of a symbol; of a choice, whose members it lists, ``value`` or nothing."""
    member = f"{name}_{value}".upper()
    return as_text(value) if lines.get(member) == "y" else lines.get(name)
