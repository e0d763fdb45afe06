"""Studies as data: TOML files with one ``[[step]]`` for each step.

    name = "heads"
    seeds = "1-3"

    [[step]]
    name = "baseline"
    title = "GPT-2"

    [[step]]
    name = "two-heads"
    title = "two heads of keys and values"
    set = { ATTENTION_PROJECTION_GROUPED = true, N_KV_HEAD = 2 }
    params = [-0.17, 0.0]

A step changes its ``parent``, by default the first step. ``set`` has Kconfig symbols and values;
``like`` repeats the changes of an earlier step, before those of ``set``. ``params`` are the lowest
and the highest change of the parameter count against the parent, as fractions. A study of speed has
``judge = false``: its steps may predict different texts, and no step is claimed to be better. ``unit``
is nats or bits-per-byte, by default VERDICT_UNIT.
"""

from collections.abc import Mapping
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

from gpt2.study.step import DEFAULT_PARAMS, HELP, SLUG, Step, Study
from lib.errors import CONTROL_CHARACTER, ConfigError
from lib.report.options import NATS, UNITS
from lib.runs.run import parse_seeds
from lib.toml_files import TomlEntries

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
    reader = _Reader(path, "step", "study", HELP, parse_float=_Fraction)
    steps = reader.steps()
    if reader.problems:
        raise ConfigError(*reader.problems)
    content = reader.content
    if is_own:
        steps = [replace(s, places=reader.places(i, s)) for i, s in enumerate(steps)]
    seeds = parse_seeds(content.get("seeds", ""))
    judge, unit = content.get("judge", True), content.get("unit", "").replace("-", "_")
    return Study(content["name"], steps, seeds, is_own, judge, unit)


class _Reader(TomlEntries):
    """The problems of one study file, and the steps without problems."""

    def steps(self) -> list[Step]:
        """Return the steps, and note every problem of the file."""
        self.keys(self.content, _FILE_KEYS, None)
        self._name(self.content, None)
        try:
            parse_seeds(str(self.content.get("seeds", "")))
        except ConfigError as error:
            self.note(f"seeds: {error.problems[0].what}", "invalid-value", None, "seeds")
        names = [unit.replace("_", "-") for unit in UNITS]
        if self.content.get("unit", NATS) not in names:
            what = f"unit: invalid {self.content['unit']!r} (expected {' or '.join(names)})"
            self.note(what, "invalid-value", None, "unit")
        entries = self.entries()
        if entries is None:
            return []
        if not 2 <= len(entries) <= _MAX_STEPS:
            what = f"{len(entries)} steps (expected 2 to {_MAX_STEPS} [[step]] tables)"
            self.note(what, "invalid-value", None)
            return []
        steps: list[Step] = []
        for index, entry in enumerate(entries):
            if step := self._step(index, entry, {s.slug: s for s in steps}):
                steps.append(step)
        return steps

    def places(self, index: int, step: Step) -> dict[str, str]:
        """Return file:line of the step, as "", and of each symbol that it sets."""
        return {"": self.where(index)} | {name: self.where(index, name) for name in step.set}

    def _name(self, entry: Mapping[str, Any], index: int | None) -> None:
        name = entry.get("name", "")
        if not isinstance(name, str) or not SLUG.fullmatch(name) or len(name) > _MAX_NAME:
            expected = f"lower-case words joined by hyphens, at most {_MAX_NAME} characters"
            what = f"name: invalid {name!r} (expected {expected})"
            self.note(what, "invalid-slug", index, "name")

    def _step(
        self, index: int, entry: Mapping[str, Any], before: Mapping[str, Step]
    ) -> Step | None:
        """Return the step of an entry; None after a problem. ``before`` are the earlier steps."""
        count = len(self.problems)
        self.keys(entry, _STEP_KEYS, index)
        self._name(entry, index)
        if len(self.problems) > count:
            return None
        title = str(entry.get("title", ""))
        if len(title) > _MAX_TITLE or CONTROL_CHARACTER.search(title):
            what = f"title: expected one line of at most {_MAX_TITLE} characters"
            self.note(what, "invalid-value", index, "title")
        like = entry.get("like", "")
        if like and like not in before:
            what = f"like: unknown step {like!r} (expected the name of an earlier step)"
            self.note(what, "unknown-step", index, "like")
            return None
        changes = dict(before[like].set) if like else {}
        for name, value in entry.get("set", {}).items():
            if isinstance(value, bool | int | str):
                changes[name] = value if isinstance(value, bool | int) else str(value)
            else:
                what = f"{name}: invalid {value!r} (expected true, false, a number or text)"
                self.note(what, "invalid-value", index, name)
        params = self._params(entry, index)
        parent = entry.get("parent", next(iter(before), ""))
        return (
            None
            if len(self.problems) > count
            else Step(entry["name"], title, parent, changes, params)
        )

    def _params(self, entry: Mapping[str, Any], index: int) -> tuple[float, float]:
        given = entry.get("params", list(DEFAULT_PARAMS))
        numbers = [float(n) for n in given if isinstance(n, int | float | _Fraction)]
        if len(given) != 2 or len(numbers) != 2 or not -1 <= numbers[0] <= numbers[1] < inf:
            what = f"params: invalid {given!r} (expected [lowest, highest] change, from -1)"
            self.note(what, "invalid-value", index, "params")
            return DEFAULT_PARAMS
        return numbers[0], numbers[1]
