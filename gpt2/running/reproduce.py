"""``make reproduce``: train a finished run again from its directory and compare the results.

The run directory records configuration, code, torch version, device and data. If one of these
differs here, equal results are not expected, and nothing is trained unless forced.
"""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpt2.config import Config
from gpt2.data.dataset import read_manifest
from gpt2.data.prepare import prepare_dataset
from gpt2.records.files import allowed_symbols, find_finished, own_values, recorded_config
from gpt2.running.backend import Gpt2Backend, new_executor
from gpt2.running.launch import scratch_plan, train_scratch
from gpt2.running.recorded_inputs import require_recorded_inputs
from gpt2.study.plan import Plan, config_layers, make_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.console import confirm, log
from lib.errors import ConfigError, PreflightError, Problem
from lib.project import ROOT
from lib.report.compare import (
    DIVERGED,
    EXIT_CODES,
    NOT_COMPARABLE,
    Comparison,
    compare_expected_equal,
    comparison_to_json,
    comparison_to_text,
    new_comparison,
)
from lib.report.run_facts import RunFacts, observed_differences, read_run_facts
from lib.runs.code import checkout_commit, describe_patch, has_commit, mismatched_files
from lib.runs.record import CodeRecord, RunRecord
from lib.runs.run_dir import RunDir
from lib.tracking.options import TRACKERS

FOLDER = "reproduced"
TWICE = "determinism"


@dataclass(frozen=True)
class Request:
    """Options of ``make reproduce``."""

    run: str
    build_dir: Path
    # A data folder; "" for that of the build folder.
    data: str = ""
    force: bool = False
    # Consent to run the code of the run's code.diff, without a question.
    yes: bool = False
    json: bool = False


def reproduce(request: Request) -> tuple[int, str]:
    """Train the run again below the build folder and compare. Return the exit code and text.

    Exit code 0 means the same bytes, 1 diverged, 4 not comparable; an interrupted training returns
    its own exit code. Raises ConfigError if the run is not finished, DataError if its data is not
    available.
    """
    run = RunDir(find_finished(request.run, request.build_dir).path.absolute())
    original = read_run_facts(run)
    commit = original.record.code
    config, reasons = _configuration(original.record, request.build_dir)
    if config is None:
        return _not_comparable(run, reasons, request.json)
    folder = request.build_dir / FOLDER
    build_dir = request.build_dir
    config = with_data(config, request.data, build_dir)
    plan = scratch_plan(config, [run.path.name], folder, build_dir)
    edits = run.code_diff
    code = [] if request.force else _changed_files(original)
    if code and edits.exists() and has_commit(str(commit.git_sha)):
        return _in_original_tree(request, run, original)
    reasons += _environment_differences(plan, original)
    if request.force or not reasons:
        require_recorded_inputs(config, original.record, build_dir)
        reasons += _data_differences(config, build_dir, original)
    if reasons and not request.force:
        advice = _recovery_advice(run, request.data, commit) if code else []
        return _not_comparable(run, [*reasons, *advice], request.json)
    for reason in reasons:
        log("WARN", f"ignored by --force: {reason}")
    settings = original.record.settings
    settings = {name: settings[name] for name in settings.keys() & allowed_symbols()}
    if exit_code := train_scratch(plan, settings, anew=request.force):
        return exit_code, ""
    repeated = read_run_facts(RunDir(plan.runs[0].path))
    return _formatted(_verdict(original, repeated, reasons), request.json)


def train_twice(
    build_dir: Path, run: str = "", defconfig: str = "", steps: str = "", *, json: bool = False
) -> tuple[int, str]:
    """Train one configuration twice and compare the runs. Return the exit code and text.

    The configuration is that of ``run``, of ``defconfig``, or of .config; of a study, the first run
    or the first of ``steps``. Both directories are created below the build folder.
    """
    config = _config_to_repeat(build_dir, run, defconfig, steps)
    plan = scratch_plan(config, ["first", "second"], build_dir / TWICE, build_dir)
    if exit_code := train_scratch(plan):
        return exit_code, ""
    first, second = (read_run_facts(RunDir(run.path)) for run in plan.runs)
    comparison = compare_expected_equal(first, second, _nondeterminism(first))
    return _formatted(comparison, json)


def _config_to_repeat(build_dir: Path, run: str, defconfig: str, steps: str) -> Config:
    if run:
        record = RunRecord(find_finished(run, build_dir))
        config, reasons = _configuration(record, build_dir)
        if config is None:
            raise ConfigError(*(Problem(what, code="run.other-code") for what in reasons))
        require_recorded_inputs(config, record, build_dir)
        return config
    layers = defconfig_layers(ROOT, defconfig) if defconfig else config_layers(build_dir)
    config = make_plan(layers, build_dir, steps=steps).runs[0].config
    return Config.from_values(unobserved(config.values))


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


def _environment_differences(plan: Plan, original: RunFacts) -> list[str]:
    """Return the differences of machine and code, and reasons why the run is not repeatable."""
    backend = Gpt2Backend(plan, new_executor(plan))
    reasons = [_as_reason(difference) for difference in backend.drift(original.run)]
    if fallbacks := original.observed["oom_fallbacks"]:
        reasons.append(f"oom_fallbacks: the original run was out of memory, {fallbacks}")
    if plan.base.train.budget == "time":
        reasons.append("budget: a time budget is not reproducible")
    return reasons


def _as_reason(difference: str) -> str:
    """Format a difference; torch and device include the old value, the rest are file names."""
    return difference if " (was " in difference else f"code: {difference} differs"


def _changed_files(original: RunFacts) -> list[str]:
    return mismatched_files(ROOT, original.sources)


def _data_differences(config: Config, build_dir: Path, original: RunFacts) -> list[str]:
    """Prepare the data if missing, and compare its digest with that of the original run."""
    folder = prepare_dataset(config.data, build_dir)
    digest = read_manifest(folder)["digest"]
    if digest == original.observed["data"]:
        return []
    return [f"data (was {original.observed['data'][:12]}, is {digest[:12]})"]


def _verdict(original: RunFacts, repeated: RunFacts, reasons: list[str]) -> Comparison:
    """Compare the original run with the repeated one.

    Equal bytes are reported even if conditions differ; DIVERGED requires equal conditions.
    """
    comparison = compare_expected_equal(original, repeated, [*reasons, *_nondeterminism(original)])
    if comparison["verdict"] != DIVERGED or reasons:
        return comparison
    if others := [str(difference) for difference in observed_differences(original, repeated)]:
        return comparison | {"verdict": NOT_COMPARABLE, "reasons": others}
    return comparison


def _nondeterminism(facts: RunFacts) -> list[str]:
    """Return the reasons why the same machine may produce different bits."""
    setting = "knobs.deterministic_algorithms"
    if facts.observed.get(setting) is False:
        return [f"{setting}: False, equal results are not guaranteed"]
    return []


def _not_comparable(run: RunDir, reasons: list[str], json: bool) -> tuple[int, str]:
    return _formatted(new_comparison(run, "here", NOT_COMPARABLE, reasons=reasons), json)


def _recovery_advice(run: RunDir, data: str, code: CodeRecord) -> list[str]:
    """Explain how to restore the run's code; ``code`` is the code section of its manifest."""
    sha = str(code.git_sha)
    if not has_commit(sha):
        return [f"commit {sha} of the run is not in this repository"]
    if code.dirty_tree is not False:
        return ["the run was made with uncommitted edits, and code.diff is missing"]
    tree = f"../kablate-{sha[:8]}"
    command = ["make", "-C", tree, "reproduce", f"RUN={run.path}"]
    command += [f"DATA={Path(data).absolute()}"] if data else []
    return [f"to restore the code, type: git worktree add {tree} {sha} && {shlex.join(command)}"]


def _in_original_tree(request: Request, run: RunDir, original: RunFacts) -> tuple[int, str]:
    """Reproduce the run in a checkout of its commit with the captured edits applied."""
    sha, edits = str(original.record.code.git_sha), run.code_diff
    _require_consent(sha, edits, request.yes)
    folder = request.build_dir.absolute() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="source-") as parent:
        tree = Path(parent) / "tree"
        if reasons := _restore_tree(tree, sha, edits, original):
            return _not_comparable(run, reasons, request.json)
        log("SOURCE", f"commit {sha[:12]} with the edits of {edits}")
        # An older commit has a script.
        script = tree / "scripts" / "reproduce.py"
        started = [str(script)] if script.exists() else ["-m", "lib.kablate", "reproduce"]
        command = [sys.executable, *started]
        command += ["-O", str(request.build_dir.absolute()), "--run", str(run.path)]
        command += ["--data", str(Path(request.data).absolute())] if request.data else []
        command += ["--json"] if request.json else []
        # DIRTY is the older name of ALLOW_DIRTY, which an older commit reads.
        variables = {**os.environ, "PYTHONPATH": str(tree), "ALLOW_DIRTY": "y", "DIRTY": "y"}
        variables |= {"RUN": "", "DATA": ""}
        process = subprocess.run(
            command,
            cwd=tree,
            env=variables,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    return process.returncode, process.stdout


def _require_consent(sha: str, edits: Path, yes: bool) -> None:
    """List the files that the run's edits change, and require consent to run the edited code.

    The author of the run directory also wrote its digests, so they protect against damage but not
    from a stranger. Raises ConfigError without consent.
    """
    log("SOURCE", f"the run was trained by commit {sha[:12]} and the edits of {edits}:")
    for line in describe_patch(edits).splitlines():
        log("SOURCE", line)
    question = f"{edits} is code from the run directory: apply and run it?"
    confirm(question, yes)


def _restore_tree(tree: Path, sha: str, edits: Path, original: RunFacts) -> list[str]:
    """Check out the run's code into ``tree``; return its differences from the recorded files."""
    try:
        checkout_commit(sha, edits, tree)
    except PreflightError as error:
        return [f"code: {problem}" for problem in error.problems]
    changed = mismatched_files(tree, original.sources)
    return [f"code: {name} differs from commit and code.diff" for name in changed]


def _formatted(comparison: Comparison, json: bool) -> tuple[int, str]:
    text = comparison_to_json(comparison) if json else comparison_to_text(comparison)
    return EXIT_CODES[comparison["verdict"]], text


# Inputs of a repeated run.


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
