"""The ``make randcheck`` command: random configurations through all checks; imports no torch.

Each symbol is set with some probability once its dependencies are drawn. A violated rule starts its
message with a symbol: that symbol is derived or drawn again, or the whole draw is rejected. A
configuration that fails is reduced by delta debugging, ddmin (Zeller and Hildebrandt 2002,
Simplifying and Isolating Failure-Inducing Input, section 3).
"""

import argparse
import itertools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from kconfiglib import BOOL, INT, STRING, Choice, Symbol

from gpt2.ablation.resolve import resolve_config
from gpt2.check import CHECKS, Check, select
from gpt2.check.cases import CheckCase, CheckJob
from gpt2.check.command import check_executor, check_in_workers
from gpt2.check.fields import fields_by_symbol
from gpt2.check.report import SCHEMA_VERSION, CaseReport
from gpt2.config import Config, StudyConfig
from gpt2.planning.arguments import add_fast, add_variable, require_count, whole_number
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer, parse_text
from lib.config.tree import KconfigTree
from lib.console import log
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError
from lib.files import write_atomic
from lib.runner.local import LocalExecutor
from lib.tracking.options import TRACKERS
from lib.units import format_duration

# Probability that an available symbol is set.
_SET_PROBABILITY = 0.6
# Probability that a number is an end of its range.
_EDGE_PROBABILITY = 0.1
_MAX_REPAIRS = 30
_NAME = re.compile(r"[A-Z][A-Z0-9_]+")

# Symbol → text of the value, as in a configuration file.
Settings = dict[str, str]


@dataclass(frozen=True)
class RandomConfig:
    """A random configuration, its settings, and the number of draws rejected before it."""

    number: int
    settings: Mapping[str, str]
    config: Config
    rejected: int


def draw_config(tree: KconfigTree, seed: int, number: int) -> RandomConfig:
    """Return draw ``number`` of ``seed``, which is deterministic for a given tree."""
    random = Random(f"{seed}/{number}")
    rejected = 0
    while True:
        settings = _random_settings(tree, random)
        for _ in range(_MAX_REPAIRS):
            try:
                return RandomConfig(number, settings, resolve_settings(tree, settings), rejected)
            except ConfigError as error:
                settings = _redraw_failing(tree, settings, error, random)
        rejected += 1


def resolve_settings(tree: KconfigTree, settings: Mapping[str, str]) -> Config:
    """Return the configuration of ``settings`` on top of the defaults.

    Raises ConfigError if a rule is violated.
    """
    return resolve_config(tree, [ConfigLayer.of("defconfig", "random", settings)])


def applicable_settings(tree: KconfigTree, settings: Mapping[str, str]) -> Settings:
    """Return the subset of ``settings`` that a user could set.

    Afterwards the tree is in the state that these settings produce.
    """
    # Only unmet dependencies are dropped, because every value is in range.
    layer, _ = tree.adapt(ConfigLayer.of("config", "random", settings))
    return {assignment.name: assignment.value for assignment in layer.assignments}


def _random_settings(tree: KconfigTree, random: Random) -> Settings:
    """Draw values for symbols in the order in which they become available."""
    settings: Settings = {}
    seen: set[str] = set()
    applicable_settings(tree, settings)
    while items := [item for item in _drawable_items(tree) if item.name not in seen]:
        for item in items:
            seen.add(item.name)
            if random.random() < _SET_PROBABILITY:
                settings |= _random_setting(item, random)
        settings = applicable_settings(tree, settings)
    return settings


def _drawable_items(tree: KconfigTree) -> list[Symbol | Choice]:
    """Return the visible items that affect a run; free text keeps its default."""
    return [item for item in tree.items() if item.visibility and _affects_run(item)]


def _affects_run(item: Symbol | Choice) -> bool:
    reader = fields_by_symbol().get(item.name)
    if reader is None:
        # A tracker does not change the run.
        return item.name.lower() not in TRACKERS
    # A string that is not a float is text, or a list of numbers.
    is_text = not isinstance(item, Choice) and item.orig_type is STRING and reader.kind is not float
    return reader.owner is not StudyConfig and not is_text


def _random_setting(item: Symbol | Choice, random: Random) -> Settings:
    """Draw a legal value; the key is the name that is assigned."""
    if isinstance(item, Choice):
        return {random.choice([member.name for member in item.syms if member.visibility]): "y"}
    if item.orig_type is BOOL:
        return {item.name: random.choice("yn")}
    if item.orig_type is INT:
        reader = fields_by_symbol().get(item.name)
        low, high = reader.draw if reader and reader.draw else _range(item)
        return {item.name: str(_random_integer(int(low), int(high), random))}
    reader = fields_by_symbol()[item.name]
    least, most = reader.draw or (reader.low, reader.high)
    assert least is not None and most is not None, item.name
    return {item.name: f"{_random_float(least, most, random):.3g}"}


def _random_integer(low: int, high: int, random: Random) -> int:
    """Draw from a log-uniform distribution, with extra weight on the ends."""
    if low == high or random.random() < _EDGE_PROBABILITY:
        return random.choice((low, high))
    return round(math.exp(random.uniform(math.log(max(low, 1)), math.log(high))))


def _random_float(low: float, high: float, random: Random) -> float:
    """Draw from a uniform distribution, with extra weight on the ends.

    The distribution is log-uniform if the bounds differ by more than two orders of magnitude.
    """
    if random.random() < _EDGE_PROBABILITY:
        return random.choice((low, high))
    if low > 0.0 and high / low > 100.0:
        return math.exp(random.uniform(math.log(low), math.log(high)))
    return random.uniform(low, high)


def _redraw_failing(
    tree: KconfigTree, settings: Settings, error: ConfigError, random: Random
) -> Settings:
    """Draw other values for the symbols named by the problems."""
    settings = applicable_settings(tree, settings)
    values = tree.resolve([ConfigLayer.of("defconfig", "random", settings)]).values
    for problem in error.problems:
        match = _NAME.match(problem.what)
        item = tree.find(match[0]) if match else None
        if item is None:
            continue
        if isinstance(item, Symbol) and item.choice:
            item = item.choice
        if isinstance(item, Choice):
            settings = {k: v for k, v in settings.items() if k not in {m.name for m in item.syms}}
        if item.visibility:
            settings |= _derived_setting(item, values) or _random_setting(item, random)
    return applicable_settings(tree, settings)


def _derived_setting(item: Symbol | Choice, values: Mapping[str, SymbolValue]) -> Settings:
    """Return the value that a rule determines, clamped to the symbol's range."""
    if item.name not in ("GLOBAL_BATCH", "N_EMBD"):
        return {}
    low, high = _range(item)
    if item.name == "GLOBAL_BATCH":
        per_pass = int(values["BATCH_SIZE"]) * int(values["GPUS"])
        passes = max(1, min(int(values["GRAD_ACCUMULATION"]), high // per_pass))
        batch = min(high, per_pass * passes)
        return {"GLOBAL_BATCH": str(batch), "GRAD_ACCUMULATION": str(passes)}
    heads = int(values["N_HEAD"])
    return {"N_EMBD": str(max(low, int(values["N_EMBD"]) // heads * heads, heads))}


def _range(item: Symbol) -> tuple[int, int]:
    """Return both ends of an integer symbol's range."""
    low, high = item.ranges[0][:2]
    return int(low.str_value), int(high.str_value)


# Limit for one configuration; after it, the result may not be minimal.
_TIME_LIMIT_SECONDS = 120.0
# Returns whether a subset fails, or None if it is not a valid configuration.
Test = Callable[[Sequence[str]], bool | None]


def reduce_settings(settings: Mapping[str, str], check: str, build_dir: Path) -> Settings:
    """Return a minimal subset of ``settings`` that still fails ``check``; runs in a worker.

    Settings not tested within two minutes are kept.
    """
    from gpt2.check.worker import run_in_process

    deadline = time.monotonic() + _TIME_LIMIT_SECONDS

    def fails(config: Config) -> bool:
        if time.monotonic() > deadline:
            return False
        case = CheckCase("random", "random", "random", config)
        results = run_in_process(case, [CHECKS[check]], {}, build_dir)
        return check in results and results[check].state == "failed"

    return minimize(KconfigTree(), settings, fails)


def minimize(
    tree: KconfigTree, settings: Mapping[str, str], fails: Callable[[Config], bool]
) -> Settings:
    """Return a minimal subset of ``settings`` whose configuration ``fails``.

    ``settings`` itself must fail. Removing a setting also removes the settings that depend on it.
    """
    full = non_default_settings(tree, settings)

    def subset(names: Sequence[str]) -> Settings:
        return applicable_settings(tree, {name: full[name] for name in names})

    def test(names: Sequence[str]) -> bool | None:
        try:
            return fails(resolve_settings(tree, subset(names)))
        except ConfigError:
            return None

    return subset(ddmin(list(full), test))


def non_default_settings(tree: KconfigTree, settings: Mapping[str, str]) -> Settings:
    """Return the subset of ``settings`` that differs from the defaults."""
    text = tree.minimal([ConfigLayer.of("defconfig", "random", settings)])
    return {a.name: a.value for a in parse_text(text, "defconfig", "random").assignments}


def ddmin(names: Sequence[str], test: Test) -> list[str]:
    """Return a subset that fails, and passes without any one of its names.

    Two names that are only valid together are removed together.
    """
    results: dict[tuple[str, ...], bool | None] = {}

    def cached_test(subset: Sequence[str]) -> bool | None:
        key = tuple(subset)
        if key not in results:
            results[key] = test(subset)
        return results[key]

    if cached_test([]):
        return []
    failing, pieces = list(names), 2
    while len(failing) > 1:
        size = -(-len(failing) // pieces)
        chunks = [failing[i : i + size] for i in range(0, len(failing), size)]
        rests = [[name for name in failing if name not in chunk] for chunk in chunks]
        reduced = next((s for s in (*chunks, *rests) if s and cached_test(s)), None)
        if reduced is not None:
            pieces = 2 if reduced in chunks else max(2, pieces - 1)
            failing = reduced
        elif pieces < len(failing):
            pieces = min(len(failing), 2 * pieces)
        else:
            break
    return _without_pairs(failing, cached_test)


def _without_pairs(failing: list[str], test: Test) -> list[str]:
    """Remove pairs of names that cannot be removed alone."""
    dependent = [name for name in failing if test([n for n in failing if n != name]) is None]
    for pair in itertools.combinations(dependent, 2):
        rest = [name for name in failing if name not in pair]
        if rest and test(rest):
            return ddmin(rest, test)
    return failing


# Every draw resolves, needs no prepared data, and has no target GPU.
_SKIPPED_CHECKS = ("resolve", "data", "full_size")
_PROGRESS_INTERVAL_SECONDS = 5.0


@dataclass(frozen=True)
class RandomCheckRequest:
    """Arguments of ``make randcheck``."""

    build_dir: Path
    count: int
    seed: int
    checks: str = ""
    fast: bool = False
    json: bool = False

    def __post_init__(self) -> None:
        require_count(self.count, "make randcheck COUNT=50")


def add_random_check_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``make randcheck``."""
    add_variable(parser, "count", "number of configurations", "50")
    add_variable(parser, "seed", "random seed for the configurations", "1")
    add_variable(parser, "checks", 'checks, such as "causal,reload"')
    add_fast(parser)


def random_request(arguments: argparse.Namespace) -> RandomCheckRequest:
    """Return the randcheck request for the options of ``add_random_check_options``.

    Raises ConfigError if a value is invalid.
    """
    return RandomCheckRequest(
        arguments.build_dir,
        whole_number(arguments.count, "COUNT"),
        whole_number(arguments.seed, "SEED"),
        checks=arguments.checks,
        fast=arguments.fast,
        json=arguments.json,
    )


@dataclass(frozen=True)
class ReducedFailure:
    """A draw that failed a check, and a minimal defconfig that still fails it."""

    number: int
    check: str
    # Other checks that the draw failed; the reduced configuration may pass them.
    others: Sequence[str]
    expected: str
    found: str
    defconfig: str
    # File name in the build folder.
    file: str

    @property
    def repeat(self) -> str:
        """Return the command that repeats the check."""
        return f"make check KCONFIG_CONFIG={self.file} CHECKS={self.check}"


def randcheck(request: RandomCheckRequest) -> tuple[int, str]:
    """Draw and check configurations, and reduce those that fail.

    Writes ``randcheck-N.defconfig`` into the build folder for each draw N that failed. Returns the
    exit code and the text for stdout.
    """
    started = time.monotonic()
    checks = [c for c in select(request.checks, fast=request.fast) if c.name not in _SKIPPED_CHECKS]
    tree = KconfigTree()
    drawn = [draw_config(tree, request.seed, number) for number in range(request.count)]
    request.build_dir.mkdir(parents=True, exist_ok=True)
    for old in request.build_dir.glob("randcheck-*.defconfig"):
        old.unlink()
    executor = check_executor()
    reports = _check_all(executor, drawn, checks, request.build_dir)
    failures = []
    for one in drawn:
        if failed := _failed_checks(reports[str(one.number)]):
            log("REDUCE", f"configuration {one.number} ({failed[0]} failed)")
            report = reports[str(one.number)]
            failures.append(_reduce(executor, tree, one, report, failed, request.build_dir))
    record = {
        "schema_version": SCHEMA_VERSION,
        "seed": request.seed,
        "configurations": request.count,
        "rejected_draws": sum(one.rejected for one in drawn),
        "checks": [check.name for check in checks],
        "failures": [vars(failure) | {"repeat": failure.repeat} for failure in failures],
        "seconds": round(time.monotonic() - started, 1),
    }
    code = EXIT_FAILED if failures else EXIT_DONE
    if request.json:
        return code, json.dumps(record, sort_keys=True, allow_nan=False) + "\n"
    return code, _text(record, failures)


def _check_all(
    executor: LocalExecutor, drawn: Sequence[RandomConfig], checks: Sequence[Check], build_dir: Path
) -> dict[str, CaseReport]:
    """Check draws with one worker per core. Return the reports by draw number."""
    jobs = [
        CheckJob(case_of(one), [c for c in checks if c.applies_to(one.config)]) for one in drawn
    ]
    reports: dict[str, CaseReport] = {}
    started, last_log = time.monotonic(), 0.0
    for report in check_in_workers(executor, jobs, {}, build_dir):
        reports[report.slug] = report
        if names := _failed_checks(report):
            log("FAIL", f"configuration {report.slug}: {', '.join(names)}")
        now = time.monotonic()
        if now - last_log >= _PROGRESS_INTERVAL_SECONDS or len(reports) == len(jobs):
            last_log = now
            failed = sum(bool(_failed_checks(report)) for report in reports.values())
            eta_seconds = (now - started) / len(reports) * (len(jobs) - len(reports))
            text = f"{len(reports)}/{len(jobs)} configurations, {failed} failed"
            log("CHECK", f"{text}, eta {format_duration(eta_seconds)}" if eta_seconds else text)
    return reports


def case_of(one: RandomConfig) -> CheckCase:
    """Return the case of a draw."""
    number = str(one.number)
    return CheckCase(f"random/{number}", number, number, one.config)


def _failed_checks(report: CaseReport) -> list[str]:
    return [name for name, result in report.results.items() if result.state == "failed"]


def _reduce(
    executor: LocalExecutor,
    tree: KconfigTree,
    one: RandomConfig,
    report: CaseReport,
    failed: Sequence[str],
    build_dir: Path,
) -> ReducedFailure:
    """Reduce a draw to the fewest settings that fail its first failed check, and write them."""
    arguments = (one.settings, failed[0], build_dir)
    settings: Mapping[str, str] = executor.call(reduce_settings, *arguments)
    text = tree.minimal([ConfigLayer.of("defconfig", "random", settings)])
    file = f"randcheck-{one.number}.defconfig"
    write_atomic(build_dir / file, text)
    finding = report.results[failed[0]].findings[0]
    return ReducedFailure(
        one.number, failed[0], failed[1:], finding.expected, finding.found, text, file
    )


def _text(record: Mapping[str, Any], failures: Sequence[ReducedFailure]) -> str:
    lines = []
    for failure in failures:
        outcome = f"expected {failure.expected}; found: {failure.found}  [{failure.repeat}]"
        lines.append(f"FAIL  random/{failure.number}  {failure.check}: {outcome}")
        if failure.others:
            lines.append(f"      also failed {', '.join(failure.others)}")
        lines += [f"      {line}" for line in failure.defconfig.splitlines()]
    count, failed = record["configurations"], len(failures)
    lines.append(
        f"SEED={record['seed']}, {record['rejected_draws']} draws rejected; "
        f"{record['seconds']:.0f} s in all"
    )
    return "\n".join([*lines, f"{count - failed} passed, {failed} failed"]) + "\n"
