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
from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from gpt2.config import StudyConfig
from gpt2.study.step import DEFAULT_PARAMS, Step, Study, title_parts
from lib.errors import CONTROL_CHARACTER, ConfigError, Problem, nearest
from lib.report.options import NATS, UNITS
from lib.runs.run import parse_seeds
from lib.toml_files import TomlEntries

_HERE = Path(__file__).parent
OWN = "own"
# What to read after an error.
_HELP = "see docs/own-study.md"
# Ends of the names of the runs that a plan adds to the baseline: other initial weights, the same again.
AA, AGAIN = "aa", "again"
_SLUG = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
_FILE_KEYS = {"name": str, "seeds": str, "judge": bool, "unit": str, "step": list}
_STEP_KEYS = {"name": str, "title": str, "parent": str, "like": str, "set": dict, "params": list}
_MAX_STEPS = 500
# Columns of tables, and parts of file names.
_MAX_TITLE, _MAX_NAME = 100, 40


class _Fraction(str):
    """A number with a decimal point, with the digits of the file: Kconfig has no such type."""


def read_study(path: Path, *, is_own: bool = True) -> Study:
    """Return the study of a file. Raises ConfigError with all problems.

    Problems of a user's own study are located at the lines of the file.
    """
    reader = _Reader(path, "step", "study", _HELP, parse_float=_Fraction)
    reader.check_file()
    steps = reader.steps(is_own)
    if reader.problems:
        raise ConfigError(*reader.problems)
    content = reader.content
    seeds = parse_seeds(content.get("seeds", ""))
    judge, unit = content.get("judge", True), content.get("unit", "").replace("-", "_")
    return Study(content["name"], steps, seeds, judge, unit)


class _Reader(TomlEntries):
    """The steps of one study file, and its problems."""

    def check_file(self) -> None:
        """Note the problems of the file, apart from its steps."""
        self.keys(self.content, _FILE_KEYS, None)
        self._has_name(self.content, None)
        try:
            parse_seeds(str(self.content.get("seeds", "")))
        except ConfigError as error:
            self.note(f"seeds: {error.problems[0].what}", "invalid-value", None, "seeds")
        names = [unit.replace("_", "-") for unit in UNITS]
        if self.content.get("unit", NATS) not in names:
            what = f"unit: invalid {self.content['unit']!r} (expected {' or '.join(names)})"
            self.note(what, "invalid-value", None, "unit")

    def steps(self, is_own: bool) -> list[Step]:
        """Return the steps, and note their problems."""
        entries = self.entries()
        if entries is None:
            return []
        if not 2 <= len(entries) <= _MAX_STEPS:
            what = f"{len(entries)} steps (expected 2 to {_MAX_STEPS} [[step]] tables)"
            self.note(what, "invalid-value", None)
            return []
        steps: dict[str, Step] = {}
        for index, entry in enumerate(entries):
            step = self._step(index, entry, steps, is_own)
            steps.setdefault(step.slug, step)
        return list(steps.values())

    def _step(
        self, index: int, entry: Mapping[str, Any], before: Mapping[str, Step], is_own: bool
    ) -> Step:
        """Return the step of an entry, and note its problems. ``before`` are the earlier steps."""
        count = len(self.problems)
        self.keys(entry, _STEP_KEYS, index)
        slug, baseline = str(entry.get("name", "")), next(iter(before), "")
        if not self._has_name(entry, index) or len(self.problems) > count:
            return Step(slug, "", baseline)
        self._check_slug(slug, index, before)
        changes = self._changes(entry, index, before)
        parent = str(entry.get("parent", baseline))
        if index and parent not in before:
            what = f"{slug}: parent {parent!r} is not the name of an earlier step"
            self.note(what + nearest(parent, before), "unknown-parent", index, "parent")
        if bool(index) != bool(changes):
            what = (
                f"{slug}: the step sets no symbol" if index else "the baseline must set no symbol"
            )
            self.note(what, "empty-step" if index else "baseline-changes", index)
        title = str(entry.get("title", ""))
        self._check_title(title, index)
        places = {"": self.where(index), "title": self.where(index, "title")}
        places |= {name: self.where(index, name) for name in changes}
        params = self._params(entry, index)
        return Step(slug, title, parent, changes, params, places if is_own else {})

    def _has_name(self, entry: Mapping[str, Any], index: int | None) -> bool:
        name = entry.get("name", "")
        if isinstance(name, str) and _SLUG.fullmatch(name) and len(name) <= _MAX_NAME:
            return True
        expected = f"lower-case words joined by hyphens, at most {_MAX_NAME} characters"
        self.note(f"name: invalid {name!r} (expected {expected})", "invalid-slug", index, "name")
        return False

    def _check_slug(self, slug: str, index: int, before: Mapping[str, Step]) -> None:
        """Note a problem if other runs of the study have the name."""
        reserved = [f"{next(iter(before), '')}-{end}" for end in (AA, AGAIN)]
        advice = f'type: name = "{slug}-2", or another name'
        if slug in before:
            what = f"name: {slug!r} is the name of an earlier step"
            self.note(what, "duplicate-step", index, "name", advice)
        elif slug in reserved:
            what = f"name: {slug!r} is reserved, plans add runs named {' and '.join(reserved)}"
            self.note(what, "reserved-name", index, "name", advice)

    def _check_title(self, title: str, index: int) -> None:
        try:
            text = "".join(text for text, _, _ in title_parts(title))
        except ConfigError as error:
            problem = error.problems[0]
            self.note(problem.what, "invalid-title", index, "title", problem.next)
            return
        if len(text) > _MAX_TITLE or CONTROL_CHARACTER.search(text):
            what = f"title: expected one line of at most {_MAX_TITLE} characters"
            self.note(what, "invalid-value", index, "title")

    def _changes(
        self, entry: Mapping[str, Any], index: int, before: Mapping[str, Step]
    ) -> dict[str, bool | int | str]:
        like = entry.get("like", "")
        if like and like not in before:
            what = f"like: unknown step {like!r} (expected the name of an earlier step)"
            self.note(what, "unknown-step", index, "like")
        changes = dict(before[like].set) if like in before else {}
        for name, value in entry.get("set", {}).items():
            if isinstance(value, bool | int | str):
                changes[name] = value if isinstance(value, bool | int) else str(value)
            else:
                what = f"{name}: invalid {value!r} (expected true, false, a number or text)"
                self.note(what, "invalid-value", index, name)
        return changes

    def _params(self, entry: Mapping[str, Any], index: int) -> tuple[float, float]:
        given = entry.get("params", list(DEFAULT_PARAMS))
        numbers = [float(n) for n in given if isinstance(n, int | float | _Fraction)]
        if len(given) != 2 or len(numbers) != 2 or not -1 <= numbers[0] <= numbers[1] < inf:
            what = f"params: invalid {given!r} (expected [lowest, highest] change, from -1)"
            self.note(what, "invalid-value", index, "params")
            return DEFAULT_PARAMS
        return numbers[0], numbers[1]


# The keys are the members of the Kconfig choice ABLATION_STUDY, except OWN.
STUDIES: dict[str, Study] = {
    name: read_study(_HERE / f"studies/{name}.toml", is_own=False)
    for name in ("ratio", "mechanisms", "nsa", "quickstart")
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
