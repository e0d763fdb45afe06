"""``make ls`` and ``make clean-runs``: every run below the results folder, of all configurations.

A run that cannot be read is a row with the cause. Reads status, configuration, manifest and summary
of each run; verifies no digests (``make audit`` does). Imports no torch.
"""

import contextlib
import operator
import re
import shutil
import textwrap
import time
from argparse import Namespace
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2.records.files import identity_symbols, own_values
from gpt2.study.plan import Plan
from lib import console
from lib.console import log
from lib.env.gpu import cpu_model
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, Problem, nearest, visible
from lib.files import size_bytes
from lib.json_files import DamagedRecord, MissingRecord, RecordError
from lib.make_variables import require_value
from lib.report.render import TableSection, fitting_rows, json_document, text_lines
from lib.runs.code import TreeDigests, run_drift
from lib.runs.lease import DEFAULT_SECONDS, take_lease
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.run_dir import RunDir, RunStatus, State
from lib.units import count, first_of, format_size

SCHEMA_VERSION = 1
RUN_NAME = re.compile(r"(?P<step>.+)-s(?P<seed>\d+)-(?P<hash>[0-9a-f]{8})")
# A longer name is cut before the seed in a table that must fit the terminal.
_MAX_NAME_CHARS = 44
_MAX_VALUES_SHOWN = 5
# Causes of failures and damage below the table.
_MAX_CAUSES_SHOWN = 10
# Beginning of the hidden name of a directory that is being removed.
_REMOVED = ".removed-"

# A run directory as plain values (``_row``). A figure is None if it was not recorded.
Row = Mapping[str, Any]
# ``folder``, ``runs``, ``replaced`` (the number of runs that were trained again, which are not listed)
# and ``differing``: {symbol: its values} of the symbols that can change a result, where they differ.
RunList = Mapping[str, Any]
_REPLACED = "replaced"
STATES = ("new", "running", "done", "failed", "interrupted", "stale", "damaged", _REPLACED)
# In the order of the full table; with --where, also the symbols.
_NUMBERS = ("seed", "iteration", "val_loss", "parameters", "tokens", "train_seconds")
FIELDS = ("run", "study", "step", "state", *_NUMBERS, "finished", "commit", "hash")
_HEADINGS = {"val_loss": "val loss", "parameters": "params", "train_seconds": "seconds"}
_FORMS: Mapping[str, Callable[[Any], str]] = {
    "val_loss": "{:.4f}".format,
    "train_seconds": "{:.0f}".format,
    # Eight characters of the hash, and whether there were uncommitted changes.
    "commit": lambda commit: f"{commit[:8]}{commit[40:]}",
}


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    return ("y" if value else "n") if isinstance(value, bool) else str(value)


def _value(row: Row, name: str) -> Any:
    """Return the field or symbol ``name`` of a run; None if the run has none."""
    if name == "hash":
        return row["hash8"] or None
    return row[name] if name in FIELDS else row["symbols"].get(name)


def listed_runs(folder: Path, where: str = "") -> RunList:
    """Return the runs below ``folder`` that satisfy ``where``. Raises ConfigError."""
    every = list_runs(folder)
    current = [run for run in every if run["state"] != _REPLACED]
    runs = select(current, where)
    values: dict[str, list[str]] = {}
    for name in sorted(_comparable() & {name for run in runs for name in run["symbols"]}):
        # One that another symbol hides has no value. INIT_FROM is never hidden: empty is a value.
        hidden = (None,) if name == "INIT_FROM" else (None, "")
        each = (run["symbols"].get(name) for run in runs)
        values[name] = [*dict.fromkeys(_shown(v) or "-" for v in each if v not in hidden)]
    return {
        "folder": str(folder),
        "differing": {name: shown for name, shown in values.items() if len(shown) > 1},
        "replaced": len(every) - len(current),
        "runs": runs,
    }


def list_runs(folder: Path) -> list[Row]:
    """Return every run in the study folders of ``folder``, sorted by study, step and seed."""
    studies = (path for path in folder.iterdir() if path.is_dir()) if folder.exists() else ()
    return read_runs(path for study in studies for path in study.iterdir() if is_run(path))


def read_runs(paths: Iterable[Path]) -> list[Row]:
    tree = TreeDigests()
    runs = [_row(RunRecord(RunDir(path)), tree) for path in paths]
    return sorted(runs, key=lambda run: (run["study"], run["step"], run["seed"] or 0, run["run"]))


def other_configurations(plan: Plan) -> TableSection | None:
    """Return the runs beside those of ``plan``, which are not compared; None if there are none."""
    planned = {run.path.name for run in plan.runs}
    beside = plan.folder.iterdir() if plan.folder.is_dir() else ()
    paths = [p for p in beside if p.name not in planned and is_run(p) and not RunDir(p).is_replaced]
    if not paths or not plan.runs:
        return None
    values = {run.variant.slug: run.config.values for run in reversed(plan.runs)}
    rows = []
    for run in read_runs(paths):
        symbols = run["symbols"]
        expected = values.get(run["step"], plan.runs[0].config.values)
        names = sorted(symbols.keys() & expected.keys() & _comparable())
        changes = [f"{n}={_shown(symbols[n])}" for n in names if symbols[n] != expected[n]]
        loss = "-" if run["val_loss"] is None else f"{run['val_loss']:.4f}"
        name = run["run"].partition("/")[2]
        rows.append((name, run["hash8"], run["state"], loss, _some(changes) or "-"))
    header = ("run", "configuration", "state", "val loss", "settings that differ")
    note = "Runs of this folder with another configuration: listed, and not compared.\n"
    return TableSection("Other configurations", header, rows, note)


def _comparable() -> frozenset[str]:
    """Return the symbols that can change a result, without SEED, which is a field."""
    return identity_symbols() - {"SEED"}


def is_run(path: Path) -> bool:
    run = RunDir(path)
    recorded = run.resolved_config.exists() or run.status.exists()
    named = recorded or RUN_NAME.fullmatch(path.name) is not None
    return named and path.is_dir() and not path.name.startswith(".")


def _row(record: RunRecord, tree: TreeDigests) -> Row:
    path, status = record.run.path, record.status
    name = RUN_NAME.fullmatch(path.name)
    failure = status.message if status and record.state == State.FAILED.word else record.damage
    row: dict[str, Any] = {
        "run": f"{path.parent.name}/{path.name}",
        "study": path.parent.name,
        "step": name["step"] if name else path.name,
        # One of STATES.
        "state": record.state,
        # Cause of a failure or damage.
        "problem": failure.split("\n")[0],
        "seed": int(name["seed"]) if name else None,
        "iteration": status.iteration if status else 0,
        **dict.fromkeys(("val_loss", "parameters", "tokens", "train_seconds")),
        # Seconds since the epoch, and the same as local time.
        **dict.fromkeys(("ended_at", "finished")),
        # "-dirty" is appended for uncommitted code.
        "commit": "",
        "hash8": name["hash"] if name else "",
        "run_id": "",
        # The value of every symbol.
        "symbols": {},
    }
    if status is None or record.state in ("damaged", _REPLACED):
        return row
    try:
        return row | _recorded(record, status, tree)
    except RecordError as error:
        problem = f"{error.file.name}: {error.problems[0].what}"
        return row | {"state": State.DAMAGED.word, "problem": problem}


def _recorded(record: RunRecord, status: RunStatus, tree: TreeDigests) -> dict[str, Any]:
    """Return the fields from the files of a started run; a finished run must have all files."""
    optional = () if record.is_done else (MissingRecord,)
    fields: dict[str, Any] = {}
    if record.state != State.RUNNING.word:
        fields["ended_at"] = ended_at = status.written_at
        try:
            fields["finished"] = time.strftime("%Y-%m-%d %H:%M", time.localtime(ended_at))
        except (OverflowError, OSError, ValueError):
            expected = "written_at in seconds since 1970"
            raise DamagedRecord(record.run.status, expected, str(ended_at)) from None
    with contextlib.suppress(*optional):
        fields |= {"symbols": record.symbols, "hash8": record.hash8}
    with contextlib.suppress(*optional):
        dirty = "-dirty" * (record.code.dirty_tree is True)
        fields["commit"] = f"{record.code.git_sha or UNKNOWN}{dirty}"
        fields["run_id"] = str(record.manifest.find("run", "run_id"))
    if record.is_done:
        # The model of a GPU cannot be read without torch.
        on_cpu = record.symbols.get("DEVICE", "cpu") == "cpu"
        if run_drift(record, cpu_model() if on_cpu else None, tree):
            fields["state"] = "stale"
        fields |= {n: vars(record.final)[n] for n in ("val_loss", "parameters", "tokens")}
        fields["train_seconds"] = record.timing.train_seconds
    return fields


# Conditions.


_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
# A value contains no operator, quote or pattern: N_LAYER=6,val_loss<2 would match no run.
_CONDITION = re.compile(r"""(\w+)(!=|<=|>=|=|<|>)([^=<>!*'"]+)""")
_EXAMPLE = 'type: make ls WHERE="N_LAYER=6 val_loss<2.5 state=done"'
# Fields of which a condition names the beginning.
_BEGINNINGS = ("finished", "commit", "hash")
_DAY = re.compile(r"\d{4}(-\d\d(-\d\d)?)?")


def select(runs: Sequence[Row], where: str) -> list[Row]:
    """Return the runs that have the values of, and satisfy, every condition of ``where``."""
    conditions = [_condition(text, runs) for text in where.split()]
    return [run for run in runs if all(holds(run) for holds in conditions)]


def _condition(text: str, runs: Sequence[Row]) -> Callable[[Row], bool]:
    match = _CONDITION.fullmatch(text)
    if match is None:
        expected = "expected FIELD, one of = != < <= > >=, and a value without blanks, quotes and *"
        raise _invalid(f"{text}: {expected}")
    name, sign, wanted = match.groups()
    known = [*FIELDS, *dict.fromkeys(name for run in runs for name in run["symbols"])]
    # Without runs the symbols are unknown, but not the fields.
    if name not in known and (runs or not name.isupper()):
        raise _invalid(f"unknown field {name!r}{nearest(name, known)}", "usage.unknown-field")
    if name == "finished" and not _DAY.fullmatch(wanted):
        raise _invalid(f"{text}: expected a day such as 2026-11-23")
    if name == "state" and wanted not in STATES:
        expected = f"expected one of {', '.join(STATES)}"
        raise _invalid(f"{text}: unknown state{nearest(wanted, STATES)} ({expected})")
    number, values = _number(wanted), [_value(run, name) for run in runs]
    numbers = [_number(value) for value in values if value is not None]
    if name not in _BEGINNINGS and number is None and numbers and None not in numbers:
        raise _invalid(f"{text}: expected a number, got {wanted!r}")
    compare = _OPERATORS[sign]

    def holds(run: Row) -> bool:
        value = _value(run, name)
        if value is None:
            return False
        if name in _BEGINNINGS:
            return compare(str(value)[: len(wanted)], wanted)
        own = _number(value)
        return compare(_shown(value), wanted) if None in (number, own) else compare(own, number)

    return holds


def _invalid(what: str, code: str = "usage.invalid-condition") -> ConfigError:
    return ConfigError(Problem(what, "WHERE", _EXAMPLE, code=code))


def _number(value: Any) -> float | None:
    is_number = re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", str(value))
    return float(value) if is_number and not isinstance(value, bool) else None


# Output.


def to_json(listed: RunList) -> str:
    """Return the runs as one JSON document; ``settings`` are the symbols in which the runs differ."""
    names, runs = [*listed["differing"]], []
    for run in listed["runs"]:
        symbols = run["symbols"]
        settings = {name: symbols.get(name) for name in names if symbols}
        fields = {name: value for name, value in run.items() if name != "symbols"}
        runs.append({**fields, "settings": settings})
    return json_document(SCHEMA_VERSION, {**listed, "differing": names, "runs": runs})


def to_text(listed: RunList, where: str = "", *, every_column: bool = False) -> str:
    """Return one line per run, causes of failures, the differing settings and a summary."""
    width = shutil.get_terminal_size().columns
    runs, differing = listed["runs"], listed["differing"]
    asked = re.findall(r"\w+", where)
    names = sorted(differing, key=lambda name: (name not in asked, -len(differing[name])))
    fields = [*FIELDS, *names] if every_column else ["run", "state", "val_loss", *names, "finished"]
    columns: dict[str, Sequence[str]] = {}
    for name in fields:
        values, form = [_value(run, name) for run in runs], _FORMS.get(name, _shown)
        cells = ["-" if value in (None, "") else form(value) for value in values]
        columns[_HEADINGS.get(name, name)] = cells
    if not every_column:
        end = _MAX_NAME_CHARS - 18
        columns["run"] = [
            f"{name[:end]}…{name[-17:]}" if len(name) > _MAX_NAME_CHARS else name
            for name in columns["run"]
        ]
    rows = fitting_rows(columns, [*columns], None if every_column else width)
    numeric = {_HEADINGS.get(name, name) for name in _NUMBERS}
    right = [i for i, heading in enumerate(rows[0]) if heading in numeric]
    lines = text_lines(rows, right=right) if runs else []
    texts = _problems(runs, every_column)
    if hidden := [name for name in names if name not in rows[0]]:
        ranges = "; ".join(f"{name} {_some(differing[name])}" for name in hidden)
        texts.append(f"also differ in (V=1 shows all): {ranges}")
    states = Counter(run["state"] for run in runs).most_common()
    parts = [f"{count(len(runs), 'run')} in {listed['folder']}"]
    parts += [f"{n} {state}" for state, n in states]
    parts += [f"{listed['replaced']} replaced (not listed)"] if listed["replaced"] else []
    texts.append(", ".join(parts) if runs else f"no runs in {listed['folder']}")
    for text in texts:
        lines += textwrap.wrap(text, width, subsequent_indent="  ", break_on_hyphens=False)
    return "".join(f"{visible(line)}\n" for line in lines)


def _problems(runs: Sequence[Row], full: bool) -> list[str]:
    """Return a line for each cause of a failure or damage, with the first runs unless ``full``."""
    causes: dict[str, list[str]] = {}
    for run in runs:
        if run["problem"]:
            causes.setdefault(f"{run['state']}: {run['problem']}", []).append(run["run"])
    shown = len(causes) if full else _MAX_CAUSES_SHOWN
    lines = [
        f"{first_of(names, len(names) if full else 3)}: {cause}"
        for cause, names in [*causes.items()][:shown]
    ]
    hidden = len(causes) - shown
    return lines + ([f"and {hidden} more causes (V=1 shows all)"] if hidden > 0 else [])


def _some(values: Sequence[str]) -> str:
    shown = ", ".join(value or "-" for value in values[:_MAX_VALUES_SHOWN])
    return f"{shown}, …" if values[_MAX_VALUES_SHOWN:] else shown


# The commands.


def ls(options: Namespace) -> str:
    """List the runs below OUTPUT_DIR, of all studies and configurations.

    kablate ls                                             one line per run
    kablate ls --where "N_LAYER=6 val_loss<2.5 state=done" only these

    Conditions compare a field (run, study, step, state, seed, iteration, val_loss, parameters, tokens,
    train_seconds, finished, commit, hash) or a symbol with = != < <= > >=. A run that
    cannot be read is a line with the cause. Exit code 2: invalid condition.
    """
    listed = listed_runs(results_folder(options.build_dir), options.where)
    if options.json:
        return to_json(listed)
    return to_text(listed, options.where, every_column=console.is_verbose())


def clean_runs(options: Namespace) -> tuple[int, str]:
    """Remove the runs that satisfy the conditions, after a confirmation.

    kablate clean-runs --where "state=failed"

    Conditions are those of ls. Exit codes: 0 done, 1 a run was left out, 2 invalid condition, or not
    confirmed.
    """
    where = require_value(options.where, "WHERE", 'make clean-runs WHERE="state=failed"')
    folder = results_folder(options.build_dir)
    runs = select(list_runs(folder), where)
    sizes = {run["run"]: size_bytes(folder / run["run"]) for run in runs}
    for run in runs:
        log("RUN", f"{format_size(sizes[run['run']]):>12}  {run['state']:11}  {run['run']}")
    total = f"{count(len(sizes), 'run')}, {format_size(sum(sizes.values()))}"
    reasons: list[str] = []
    if runs:
        console.confirm(f"remove {total} below {folder}?", options.yes)
        reasons = remove_runs(runs, folder)
    text = f"removed: {total}; left out: {len(reasons)}\n"
    if options.json:
        text = json_document(SCHEMA_VERSION, {"runs": sizes, "kept": reasons})
    for reason in reasons:
        log("WARN", f"left out: {reason}")
    return EXIT_FAILED if reasons else EXIT_DONE, text


def remove_runs(runs: Sequence[Row], folder: Path) -> list[str]:
    """Remove run directories, each hidden first; return a reason for each one that stays."""
    for leftover in folder.glob(f"*/{_REMOVED}*"):
        shutil.rmtree(leftover)
    reasons = []
    for run in runs:
        path = folder / run["run"]
        if path.is_symlink():
            reasons.append(f"{run['run']}: a symbolic link; remove it by hand")
            continue
        hidden = path.with_name(f"{_REMOVED}{path.name}")
        try:
            with take_lease(RunDir(path), DEFAULT_SECONDS):
                path.rename(hidden)
        except ConfigError as error:
            reasons.append(f"{run['run']}: {error.problems[0].what}")
            continue
        shutil.rmtree(hidden)
    return reasons


def results_folder(build_dir: Path) -> Path:
    """Return the folder of all studies. Runs can be listed without a configuration."""
    return build_dir / str(own_values(build_dir)["OUTPUT_DIR"])
