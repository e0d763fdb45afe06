"""Studies as data: TOML files with one ``[[step]]`` for each step.

    name = "heads"
    seeds = "1-3"

    [[step]]
    name = "baseline"
    title = "GPT-2"

    [[step]]
    name = "two-heads"
    title = "{N_KV_HEAD:word} heads of keys and values"
    set = { ATTENTION_PROJECTION_GROUPED = true, N_KV_HEAD = 2 }
    params = [-0.17, 0.0]

A step changes its ``parent``, by default the first step. ``set`` has Kconfig symbols and values;
``like`` repeats the changes of an earlier step, before those of ``set``. The fields of a ``title`` are
symbols, with the values of the step's configuration: ``{N_KV_HEAD}`` is 2, ``{N_KV_HEAD:word}`` two,
``{MLP_SHARE:%}`` 15 %. ``params`` are the lowest and the highest change of the parameter count against
the parent, as fractions. A study of speed has ``judge = false``: its steps may predict different
texts, and no step is claimed to be better. ``unit`` is nats or bits-per-byte, by default VERDICT_UNIT.
"""

import re
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from typing import Any

from gpt2.config import StudyConfig
from gpt2.study.step import DEFAULT_PARAMS, Step, Study
from lib.errors import CONTROL_CHARACTER, ConfigError, Problem, nearest
from lib.report.options import UNITS
from lib.runs.run import parse_seeds
from lib.toml_files import TomlEntries

_HERE = Path(__file__).parent
OWN = "own"
# Ends of the names of the runs that a plan adds to the baseline: other initial weights, the same again.
AA, AGAIN = "aa", "again"
_SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_FILE_KEYS = {"name": str, "seeds": str, "judge": bool, "unit": str, "step": list}
_STEP_KEYS = {"name": str, "title": str, "parent": str, "like": str, "set": dict, "params": list}
# Columns of tables, and parts of file names.
_MAX_TITLE, _MAX_NAME = 200, 40


class _Fraction(str):
    """A number with a decimal point, with the digits of the file: Kconfig has no such type."""


def read_study(path: Path) -> Study:
    """Return the study of a file. Raises ConfigError with all problems, located at the file's lines."""
    file = TomlEntries(path, "step", "study", "see docs/own-study.md", parse_float=_Fraction)
    content = file.content
    file.keys(content, _FILE_KEYS, None)
    _check_name(file, content, None)
    seeds: tuple[int, ...] = ()
    try:
        seeds = parse_seeds(str(content.get("seeds", "")))
    except ConfigError as error:
        file.note(f"seeds: {error.problems[0].what}", "invalid-value", None, "seeds")
    units = {"": "", **{unit.replace("_", "-"): unit for unit in UNITS}}
    unit = content.get("unit", "")
    if unit not in units:
        what = f"unit: invalid {unit!r} (expected {' or '.join([*units][1:])})"
        file.note(what, "invalid-value", None, "unit")
    entries = file.entries()
    if entries is not None and len(entries) < 2:
        what = f"{len(entries)} steps (expected at least 2 [[step]] tables)"
        file.note(what, "invalid-value", None)
    steps: dict[str, Step] = {}
    for index, entry in enumerate(entries or ()):
        step = _step(file, index, entry, steps)
        steps.setdefault(step.slug, step)
    if file.problems:
        raise ConfigError(*file.problems)
    return Study(content["name"], [*steps.values()], seeds, content.get("judge", True), units[unit])


def _check_name(file: TomlEntries, entry: Mapping[str, Any], index: int | None) -> None:
    name = entry.get("name", "")
    if not (isinstance(name, str) and _SLUG.fullmatch(name) and len(name) <= _MAX_NAME):
        expected = f"lower-case words joined by hyphens, at most {_MAX_NAME} characters"
        file.note(f"name: invalid {name!r} (expected {expected})", "invalid-slug", index, "name")


def _step(
    file: TomlEntries, index: int, entry: Mapping[str, Any], before: Mapping[str, Step]
) -> Step:
    """Return the step of an entry, and note its problems. ``before`` are the earlier steps."""

    def note(what: str, kind: str, key: str = "") -> None:
        file.note(what, kind, index, key)

    count = len(file.problems)
    file.keys(entry, _STEP_KEYS, index)
    _check_name(file, entry, index)
    slug, baseline = str(entry.get("name", "")), next(iter(before), "")
    if len(file.problems) > count:
        return Step(slug, "", baseline)
    reserved = [f"{baseline}-{end}" for end in (AA, AGAIN)]
    if slug in before:
        note(f"name: {slug!r} is the name of an earlier step", "duplicate-step", "name")
    elif slug in reserved:
        what = f"name: {slug!r} is reserved, plans add runs named {' and '.join(reserved)}"
        note(what, "reserved-name", "name")
    title, like = entry.get("title", ""), entry.get("like", "")
    if len(title) > _MAX_TITLE or CONTROL_CHARACTER.search(title):
        what = f"title: expected one line of at most {_MAX_TITLE} characters"
        note(what, "invalid-value", "title")
    if like and like not in before:
        what = f"like: unknown step {like!r} (expected the name of an earlier step)"
        note(what, "unknown-step", "like")
    changes = dict(before[like].set) if like in before else {}
    for name, value in entry.get("set", {}).items():
        if not isinstance(value, bool | int | str):
            what = f"{name}: invalid {value!r} (expected true, false, a number or text)"
            note(what, "invalid-value", name)
        changes[name] = value if isinstance(value, bool | int) else str(value)
    parent = entry.get("parent", baseline)
    if index and parent not in before:
        what = f"{slug}: parent {parent!r} is not the name of an earlier step"
        note(what + nearest(parent, before), "unknown-parent", "parent")
    if index and not changes:
        note(f"{slug}: the step sets no symbol", "empty-step")
    elif changes and not index:
        note(f"{slug}: the baseline must set no symbol", "baseline-changes")
    params = entry.get("params", DEFAULT_PARAMS)
    low, high = map(float, params) if _is_range(params) else DEFAULT_PARAMS
    if not _is_range(params):
        what = f"params: invalid {params!r} (expected [lowest, highest] change, from -1)"
        note(what, "invalid-value", "params")
    # A step of a built-in study is found by its name.
    keys = () if file.path.is_relative_to(_HERE) else ("", "title", *changes)
    places = {key: file.where(index, key) for key in keys}
    return Step(slug, title, parent, changes, (low, high), places)


def _is_range(params: Sequence[Any]) -> bool:
    numbers = [float(n) for n in params if isinstance(n, int | float | _Fraction)]
    return len(params) == len(numbers) == 2 and -1 <= numbers[0] <= numbers[1] < inf


# The keys are the members of the Kconfig choice ABLATION_STUDY, except OWN.
STUDIES: dict[str, Study] = {
    name: read_study(_HERE / f"studies/{name}.toml")
    for name in ("ratio", "mechanisms", "nsa", "quickstart", "modern", "parts")
}
RATIO = STUDIES["ratio"]
# Folders of results that are not those of a study.
_RESERVED = {*STUDIES, "matrix", "prolonged", "single", "sweep"}


def study_of(options: StudyConfig, build_dir: Path) -> Study:
    """Return the selected study; a file is relative to ``build_dir``.

    Raises ConfigError if the file of an own study is unreadable or wrong.
    """
    if options.study != OWN:
        return STUDIES[options.study]
    path = build_dir / Path(options.study_file).expanduser()
    study = read_study(path)
    if study.name in _RESERVED or study.name.startswith("prolonged-"):
        what = f"name: reserved (expected none of {', '.join(sorted(_RESERVED))})"
        raise ConfigError(Problem(what, str(path), code="study.reserved-name"))
    return study
