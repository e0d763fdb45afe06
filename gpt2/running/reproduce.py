"""``make reproduce``: train a finished run again from its directory and compare the results.

The run directory records configuration, code, torch version, device and data. If one of these
differs here, equal results are not expected, and nothing is trained unless forced.
"""

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.data.dataset import read_manifest, select_corpus
from gpt2.data.prepare import prepare_dataset
from gpt2.records.files import allowed_symbols, find_finished, own_values, recorded_config
from gpt2.running.backend import Gpt2Backend
from gpt2.running.launch import run_with
from gpt2.study.plan import Plan, config_layers, make_plan
from gpt2.weights.source import download_weights, weight_files
from lib.config.dotconfig import ExplicitSetting, defconfig_layers
from lib.config.field import SymbolValue
from lib.console import log
from lib.errors import ConfigError, DataError, PreflightError, Problem
from lib.files import sha256_file
from lib.project import ROOT
from lib.report.compare import (
    DIVERGED,
    NOT_COMPARABLE,
    Comparison,
    compare_expected_equal,
    comparison_shown,
    new_comparison,
)
from lib.report.run_facts import observed_differences, observed_facts
from lib.runner.queue import belongs_to_different_run, set_aside
from lib.runner.runner import RunnerOptions
from lib.runs.code import has_commit
from lib.runs.record import CodeRecord, RunRecord
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunDir
from lib.tracking.options import TRACKERS
from lib.units import first_of

FOLDER = "reproduced"
TWICE = "determinism"
_TEXTS = ("CUSTOM_PATH", "CUSTOM_VAL_PATH", "DATASET_PATH")
_INPUTS = (*_TEXTS, "INIT_FROM")


def reproduce(
    named: str, build_dir: Path, data: str = "", *, force: bool = False, json: bool = False
) -> tuple[int, str]:
    """Train a finished run again below the build folder and compare. Return the exit code and text.

    ``data`` is a data folder, "" that of the build folder. An interrupted training returns its own exit
    code. Raises ConfigError if the run is not finished, DataError if its data is not available.
    """
    run = RunDir(find_finished(named, build_dir).path.absolute())
    original = RunRecord(run)
    config, reasons = _configuration(original, build_dir)
    if config is None:
        return comparison_shown(new_comparison(run, "here", NOT_COMPARABLE, reasons=reasons), json)
    config = with_data(config, data, build_dir)
    plan = scratch_plan(config, [run.path.name], build_dir / FOLDER, build_dir)
    reasons += _environment_differences(plan, original)
    if force or not reasons:
        require_recorded_inputs(config, original, build_dir)
        digest = read_manifest(prepare_dataset(config.data, build_dir))["digest"]
        recorded = str(original.manifest.find("data", "digest"))
        if digest != recorded:
            reasons.append(f"data (was {recorded[:12]}, is {digest[:12]})")
    if reasons and not force:
        if any(reason.startswith("code: ") for reason in reasons):
            reasons.append(_recovery_advice(run, data, original.code))
        return comparison_shown(new_comparison(run, "here", NOT_COMPARABLE, reasons=reasons), json)
    for reason in reasons:
        log("WARN", f"ignored by --force: {reason}")
    settings = original.settings
    settings = {name: settings[name] for name in settings.keys() & allowed_symbols()}
    if exit_code := train_scratch(plan, settings, anew=force):
        return exit_code, ""
    repeated = RunRecord(RunDir(plan.runs[0].path))
    return comparison_shown(_verdict(original, repeated, reasons), json)


def train_twice(
    build_dir: Path, run: str = "", defconfig: str = "", steps: str = "", *, json: bool = False
) -> tuple[int, str]:
    """Train one configuration twice and compare the runs. Return the exit code and text.

    The configuration is that of ``run``, of ``defconfig``, or of .config; of a study, the first run
    or the first of ``steps``. Both directories are created below the build folder.
    """
    if run:
        record = RunRecord(find_finished(run, build_dir))
        config, reasons = _configuration(record, build_dir)
        if config is None:
            raise ConfigError(*(Problem(what, code="run.other-code") for what in reasons))
        require_recorded_inputs(config, record, build_dir)
    else:
        layers = defconfig_layers(ROOT, defconfig) if defconfig else config_layers(build_dir)
        planned = make_plan(layers, build_dir, steps=steps).runs[0].config
        config = Config.from_values(unobserved(planned.values))
    plan = scratch_plan(config, ["first", "second"], build_dir / TWICE, build_dir)
    if exit_code := train_scratch(plan):
        return exit_code, ""
    first, second = (RunRecord(RunDir(run.path)) for run in plan.runs)
    return comparison_shown(compare_expected_equal(first, second, _nondeterminism(first)), json)


def _configuration(record: RunRecord, build_dir: Path) -> tuple[Config | None, list[str]]:
    """Return the run's configuration under this code, and its differences from the record.

    The configuration is None if this code rejects the recorded symbols.
    """
    own = own_values(build_dir)
    try:
        config = Config.from_values(unobserved(recorded_config(record, own).values))
    except ConfigError as error:
        return None, [f"configuration: rejected by this code: {p}" for p in error.problems]
    if config.hash8 == record.hash8:
        return config, []
    return config, [f"configuration: identity {config.hash8} (was {record.hash8})"]


def _environment_differences(plan: Plan, original: RunRecord) -> list[str]:
    """Return the differences of machine and code, and reasons why the run is not repeatable."""
    drift = Gpt2Backend(plan).drift(original)
    # Torch and device with their old values; the others are files.
    reasons = [each for each in drift if " (was " in each]
    if files := [each for each in drift if " (was " not in each]:
        reasons.append(f"code: {first_of(files, 5)} {'differ' if len(files) > 1 else 'differs'}")
    if fallbacks := observed_facts(original)["oom_fallbacks"]:
        reasons.append(f"oom_fallbacks: the original run was out of memory, {fallbacks}")
    if divisions := observed_facts(original)["earlier_divisions"]:
        reasons.append(f"earlier_divisions: the number of processes was changed, {divisions}")
    if plan.base.train.budget == "time":
        reasons.append("budget: a time budget is not reproducible")
    return reasons


def _verdict(original: RunRecord, repeated: RunRecord, reasons: list[str]) -> Comparison:
    """Compare the original run with the repeated one.

    Equal bytes are reported even if conditions differ; DIVERGED requires equal conditions.
    """
    comparison = compare_expected_equal(original, repeated, [*reasons, *_nondeterminism(original)])
    if comparison["verdict"] != DIVERGED or reasons:
        return comparison
    if others := [str(difference) for difference in observed_differences(original, repeated)]:
        return comparison | {"verdict": NOT_COMPARABLE, "reasons": others}
    return comparison


def _nondeterminism(record: RunRecord) -> list[str]:
    """Return the reasons why the same machine may produce different bits."""
    setting = "knobs.deterministic_algorithms"
    if observed_facts(record).get(setting) is False:
        return [f"{setting}: False, equal results are not guaranteed"]
    return []


def _recovery_advice(run: RunDir, data: str, code: CodeRecord) -> str:
    """Return the commands that restore the code of the run, with its uncommitted edits."""
    sha = str(code.git_sha)
    if not has_commit(sha):
        return f"commit {sha} of the run is not in this repository"
    tree, warning = f"../kablate-{sha[:8]}", ""
    commands = [["git", "worktree", "add", tree, sha]]
    if code.dirty_tree is not False:
        if not run.code_diff.exists():
            return "the run was made with uncommitted edits, and code.diff is missing"
        # Its author wrote the recorded digest, too.
        warning = f"read {run.code_diff}, which is code from the folder of the run; "
        commands.append(["git", "-C", tree, "apply", str(run.code_diff)])
    commands.append(["make", "-C", tree, "reproduce", f"RUN={run.path}"])
    commands[-1] += [f"DATA={Path(data).absolute()}"] if data else []
    return f"to restore the code, {warning}type: {' && '.join(map(shlex.join, commands))}"


def unobserved(values: Mapping[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return ``values`` without trackers and time limit, which cannot change a bit of the result."""
    trackers_off = dict.fromkeys(TRACKERS.symbols(), False)
    return {**values, **trackers_off, "RUN_TIME_LIMIT_SECONDS": 0}


def with_data(config: Config, data: str, build_dir: Path) -> Config:
    """Return ``config`` with the data folder ``data``, as in DATA_DIR; "" changes nothing.

    Raises ConfigError unless it is one: a text of the run is read where the run names it.
    """
    if not data:
        return config
    path = Path(data).absolute()
    if (path / "downloads").is_dir() or any(path.glob("*/dataset.json")):
        return Config.from_values({**config.values, "DATA_DIR": str(path)})
    what = "not a folder of data sets" if path.exists() else "no such folder"
    advice = "type: make reproduce RUN=DIR DATA=DIR"
    if text := config.data.custom_path:
        advice = f"the text of the run is read at {(build_dir / text).absolute()}"
    raise ConfigError(Problem(what, data, advice, code="data.missing"))


def require_recorded_inputs(config: Config, record: RunRecord, build_dir: Path) -> None:
    """Require that local texts and initial weights that ``config`` has from ``record`` are the run's.

    The folder of a run may be a stranger's, and could name any file of this machine. Raises DataError
    or PreflightError if a file is missing or differs from its recorded digest.
    """
    taken = [n for n in _INPUTS if config.values[n] and config.values[n] == record.symbols.get(n)]
    where = str(record.manifest.file)
    if texts := [name for name in _TEXTS if name in taken]:
        here = select_corpus(config.data, build_dir).provenance()
        known: Any = record.manifest.find("data", "sources")
        if not isinstance(known, list) or not all(each in known for each in here):
            path = str(config.values[texts[0]])
            what = f"{texts[0]}: {path} is not the recorded text of the run (expected the same digests)"
            advice = f"put the text of the run at {(build_dir / path).absolute()}"
            raise DataError(Problem(what, where, advice, code="data.mismatch"))
    if "INIT_FROM" in taken:
        _, *files = weight_files(download_weights(config, build_dir))
        recorded = {digest for name, digest in record.sources.items() if Path(name).is_absolute()}
        if not {sha256_file(path) for path in files} <= recorded:
            what = f"INIT_FROM: {config.init.init_from} differs from the initial weights of the run"
            raise PreflightError(Problem(what, where, "restore them", code="weights.mismatch"))


def scratch_plan(config: Config, names: Sequence[str], folder: Path, build_dir: Path) -> Plan:
    """Return a plan that trains ``config`` once for each of ``names``, below ``folder``."""
    runs = [
        Run(folder.name, RunVariant(name), config.seed, config, folder / name) for name in names
    ]
    return Plan(folder.name, folder, build_dir, config, runs)


def train_scratch(
    plan: Plan, settings: Mapping[str, ExplicitSetting] | None = None, *, anew: bool = True
) -> int:
    """Train the runs of ``plan``, made by ``scratch_plan``, and return the exit code.

    ``settings`` are the recorded sources of the settings. Finished and damaged runs are moved aside, and
    with ``anew`` started ones, too.
    """
    for run in plan.runs:
        state = RunRecord(RunDir(run.path)).state
        if run.path.exists() and (
            anew or state in ("done", "damaged") or belongs_to_different_run(run)
        ):
            aside = set_aside(RunDir(run.path))
            log("RERUN", f"{run.path.name}   old run moved to {aside.name}")
    # Uncommitted code is allowed: the caller compares every source file with the original run.
    backend = Gpt2Backend(plan, dirty=True, settings=settings or {})
    return run_with(backend, plan, plan.runs, RunnerOptions(stale="rerun"))
