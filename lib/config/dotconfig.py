"""Files of a configuration: ``.config``, the generated ``config.py``, defconfigs and fragments."""

import ast
import dataclasses
import os
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import TypedDict

from lib.config.field import SymbolValue
from lib.config.layers import (
    ConfigLayer,
    ResolvedConfig,
    parse_command_line_settings,
    read_file,
    read_origins,
    to_kconfig_text,
)
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem, nearest
from lib.files import regular_file, sha256_file, write_atomic


@dataclass(frozen=True)
class ConfigWorkspace:
    """Source tree and build folder; ``KCONFIG_CONFIG`` overrides the name of ``.config``."""

    root: Path
    build: Path

    @property
    def config(self) -> Path:
        """Return the path of the configuration file."""
        return self.build / (os.environ.get("KCONFIG_CONFIG") or ".config")

    @property
    def config_py(self) -> Path:
        """Return the path of the constants that are generated from the configuration file."""
        return self.build / "config.py"

    @property
    def layer(self) -> ConfigLayer:
        """Return the full configuration as one layer, with the symbols that are at defaults.

        Raises ConfigError like ``read_constants``.
        """
        read_constants(self)
        return _full_layer(self.config)


def read_config(path: Path) -> ConfigLayer:
    """Return the full configuration as one layer. Raises ConfigError if ``path`` does not exist."""
    if not path.exists():
        raise _no_configuration(path)
    return read_file(path, "config")


def _no_configuration(path: Path) -> ConfigError:
    advice = "type: make list-defconfigs, then make defconfig-NAME; or make menuconfig"
    return ConfigError(Problem("no configuration", str(path), advice, code="config.missing"))


def resolve_config(tree: KconfigTree, path: Path, *layers: ConfigLayer) -> ResolvedConfig:
    """Resolve ``path`` with ``layers`` on top; each value has its original source as origin.

    A line of the file that was changed since ``.config`` was written has the label "edited".
    """
    return with_origins(tree, tree.resolve([_full_layer(path), *layers]), path)


def _full_layer(path: Path) -> ConfigLayer:
    """Return ``.config`` with the symbols and choices that were at defaults when it was written."""
    records = read_origins(path) or {}
    defaults = frozenset(name for name, record in records.items() if record["label"] == "default")
    return dataclasses.replace(read_config(path), defaults=defaults)


def with_origins(tree: KconfigTree, resolution: ResolvedConfig, path: Path) -> ResolvedConfig:
    """Return ``resolution``, which ``tree`` resolved last, with the origins recorded beside ``path``."""
    records = read_origins(path)
    if records is None:
        return resolution
    origins = dict(resolution.origins)
    for name, origin in resolution.origins.items():
        if origin is None or origin.label != "config":
            continue
        record, value = records.get(name), to_kconfig_text(resolution.values[name])
        if record is None or record["value"] != value:
            origins[name] = dataclasses.replace(origin, label="edited")
            continue
        label, item = record["label"], tree.find(name)
        assert item is not None, name
        if label == "default":
            label = "" if tree.default(item) == value else "former default"
        source = dataclasses.replace(origin, label=label, where=record["where"])
        origins[name] = source if label else None
    return dataclasses.replace(resolution, origins=origins)


# The generated ``config.py``: one ``NAME = literal`` per line, parsed as data, never imported. Its
# header records the SHA-256 of the ``.config`` that it was generated from, and of its own lines.


_HEADER = """\
# Generated from .config by make. Do not edit: change .config (make menuconfig), then make.
# Parsed as data, not imported.
"""
_DIGESTS = "# SHA-256 of .config {}, of the lines below {}\n"
_DIGEST_LINE = re.compile(_DIGESTS.strip().replace("{}", "([0-9a-f]{64})"))


def write_constants(resolution: ResolvedConfig, place: ConfigWorkspace) -> None:
    """Write every value, sorted by name, as a Python literal of its type.

    ``resolution`` is the resolution of the workspace's configuration file.
    """
    lines = "".join(f"{name} = {value!r}\n" for name, value in sorted(resolution.values.items()))
    digests = _DIGESTS.format(sha256_file(place.config), sha256(lines.encode()).hexdigest())
    write_atomic(place.config_py, f"{_HEADER}{digests}{lines}")


def read_constants(place: ConfigWorkspace) -> dict[str, SymbolValue]:
    """Return the values of ``config.py`` by name.

    Raises ConfigError if the configuration file or ``config.py`` is missing, or if ``config.py`` is
    edited, or older than a change of the configuration file.
    """
    values, digest = read_generated(place)
    if digest != sha256_file(place.config):
        what = f"stale, {place.config} has changed since (expected the same content)"
        problem = Problem(what, str(place.config_py), _regenerate(place), code="config.stale")
        raise ConfigError(problem)
    return values


def read_generated(place: ConfigWorkspace) -> tuple[dict[str, SymbolValue], str]:
    """Return the values of ``config.py``, which may be stale, and the digest of its source.

    Raises ConfigError if a file is missing or unreadable, or ``config.py`` is not as generated.
    """
    path = place.config_py
    if not place.config.exists():
        raise _no_configuration(place.config)
    try:
        with open(path, encoding="utf-8", errors="replace", opener=regular_file) as stream:
            text = stream.read()
    except OSError as error:
        absent = isinstance(error, FileNotFoundError)
        what = "not generated yet" if absent else f"unreadable: {error.strerror}"
        code = f"config.{'missing' if absent else 'unreadable'}"
        raise ConfigError(Problem(what, str(path), _regenerate(place), code=code)) from None
    header, _, lines = text.removeprefix(_HEADER).partition("\n")
    digests = _DIGEST_LINE.fullmatch(header)
    if digests is None or digests[2] != sha256(lines.encode()).hexdigest():
        what = f"edited (expected the lines that make generated; {place.config} is to be changed)"
        advice = _regenerate(place, "rm")
        raise ConfigError(Problem(what, str(path), advice, code="config.edited"))
    pairs = (line.split(" = ", 1) for line in lines.split("\n")[:-1])
    return {name: ast.literal_eval(literal) for name, literal in pairs}, digests[1]


def _regenerate(place: ConfigWorkspace, first: str = "") -> str:
    """Return the command that generates ``config.py``, after removing it if ``first`` is rm."""
    path = shlex.quote(str(place.config_py))
    options = "" if place.build == Path() else f" O={shlex.quote(str(place.build))}"
    return f"type: {f'rm {path}; ' if first else ''}make{options} {path}"


# Configurations that ship with the tree (defconfigs) and fragments to combine with them.


FOLDER = "defconfigs"
# The name of a fragment's file begins with it.
_PLUS = "+"
_BASES = re.compile(r"#\s*bases:(.*)")


@dataclass(frozen=True)
class Defconfig:
    """Defconfig or fragment. ``bases`` are the defconfigs a fragment supports ("*" for any)."""

    name: str
    # First comment line.
    summary: str
    path: Path
    bases: tuple[str, ...] = ()


def list_defconfigs(root: Path) -> tuple[list[Defconfig], list[Defconfig]]:
    """Return the defconfigs and the fragments of a tree, each sorted by name."""
    folder = root / FOLDER
    files = [path for path in folder.glob("[!.]*") if path.is_file()]
    bases, fragments = list[Defconfig](), list[Defconfig]()
    for path in sorted(files):
        (fragments if path.name[0] == _PLUS else bases).append(_describe(path))
    return bases, fragments


def defconfig_layers(root: Path, spec: str, settings: str = "") -> list[ConfigLayer]:
    """Return the layers of ``NAME[+FRAGMENT…]``, followed by the layer of ``SET`` if any.

    Raises ConfigError with every unknown name and its nearest matches.
    """
    names = spec.split("+")
    bases, fragments = (
        {defconfig.name: defconfig.path for defconfig in listed} for listed in list_defconfigs(root)
    )
    missing = [] if names[0] in bases else [_unknown("defconfig", names[0], bases, fragments)]
    missing += [_unknown("fragment", n, fragments, bases) for n in names[1:] if n not in fragments]
    if missing:
        raise ConfigError(*missing)
    layers = [read_file(bases[names[0]], "defconfig", f"{FOLDER}/{names[0]}")]
    layers += [read_file(fragments[n], "fragment", f"{FOLDER}/{_PLUS}{n}") for n in names[1:]]
    return [*layers, parse_command_line_settings(settings)] if settings else layers


def _describe(path: Path) -> Defconfig:
    text = path.read_text(encoding="utf-8", errors="replace")
    lines = text.split("\n")
    comments = [line for line in lines if line[:1] == "#" and not line.endswith(" is not set")]
    matches = [match.group(1).split() for match in map(_BASES.match, comments) if match]
    summaries = (c.lstrip("# ").strip() for c in comments if not _BASES.match(c))
    bases = tuple(name for names in matches for name in names)
    return Defconfig(path.name.removeprefix(_PLUS), next(summaries, ""), path, bases)


def _unknown(kind: str, name: str, names: dict[str, Path], others: dict[str, Path]) -> Problem:
    what = f"unknown {kind} {name!r}"
    if name in others and kind == "defconfig":
        what += f"; {name} is a fragment: make defconfig-NAME+{name}"
    elif name in others:
        what += f"; {name} is a defconfig, put it first: make defconfig-{name}"
    else:
        what += nearest(name, names)
    return Problem(what, next="type: make list-defconfigs", code=f"config.unknown-{kind}")


# Explicit settings of a run's configuration: every non-default value with its source.


class ExplicitSetting(TypedDict):
    """Value, kind of source, and location in that source.

    ``label`` is defconfig, fragment or command line; "edited" for a line of ``.config`` that was
    edited by hand or in the menu; "plan" for a value set by a step, a seed or a sweep.
    """

    value: SymbolValue
    label: str
    where: str


def explicit_settings(
    config: Path, values: Mapping[str, SymbolValue], run: str
) -> dict[str, ExplicitSetting]:
    """Return the non-default settings in ``values``, a run planned from the file ``config``.

    ``run`` is the name of the run in the plan. Without recorded origins, every line of the file
    counts as edited. Raises ConfigError if a file is damaged.
    """
    records = read_origins(config) or {}
    lines = {a.name: a.value for a in read_config(config).assignments}
    explicit = {}
    for name in sorted((records.keys() | lines.keys()) & values.keys()):
        value, record, line = values[name], records.get(name), _line(lines, name, values[name])
        if line is None and (record is None or record["value"] == to_kconfig_text(value)):
            # The symbol is unavailable in the file and in the run.
            continue
        if line != to_kconfig_text(value):
            explicit[name] = ExplicitSetting(value=value, label="plan", where=run)
        elif record is None or record["value"] != line:
            explicit[name] = ExplicitSetting(value=value, label="edited", where=config.name)
        elif record["label"] != "default":
            explicit[name] = ExplicitSetting(
                value=value, label=record["label"], where=record["where"]
            )
    return explicit


def _line(lines: Mapping[str, str], name: str, value: SymbolValue) -> str | None:
    """Return the file's value of a symbol, or ``value`` if the file selects this choice member."""
    return (
        to_kconfig_text(value) if lines.get(f"{name}_{value}".upper()) == "y" else lines.get(name)
    )
