"""A run made again from its directory alone, and compared with what it was.

The directory says which configuration, which code, which torch, which device and which data. Where
one of these is another here, the two need not agree, and nothing is trained unless it is forced.
"""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gpt2.config import Config
from gpt2.data.prepare import prepare
from gpt2.data.store import read_manifest
from gpt2.finished import find_finished
from gpt2.launch import new_pool
from gpt2.planning import Plan, config_layers, make_plan
from gpt2.scratch import scratch_plan, train_scratch, unobserved, with_data
from gpt2.target import Gpt2Target
from lib.compare.checkout import check_out, has_commit, other_files
from lib.compare.facts import Facts, read_facts
from lib.compare.keys import observed_differences
from lib.compare.verdict import DIVERGED, NOT_COMPARABLE, Comparison, same_bytes, to_json, to_text
from lib.console import say
from lib.errors import ConfigError, PreflightError
from lib.kconfig import defconfig_layers
from lib.project import ROOT
from lib.rundir import RunDir

FOLDER = "reproduced"
TWICE = "determinism"


@dataclass(frozen=True)
class Request:
    """What to reproduce, from which data, and whether in spite of what differs."""

    run: str
    build_dir: Path
    # A data folder, or the text of a custom data set; "" where .config's build folder has it.
    data: str = ""
    force: bool = False
    json: bool = False


def reproduce(request: Request) -> tuple[int, str]:
    """Train the run again below the build folder and compare; exit code and text.

    0 the same bytes, 1 diverged, 4 not comparable. ConfigError where the directory is no finished
    run, DataError where its data cannot be had; what stopped a training has its own code.
    """
    found = RunDir(find_finished(request.run, request.build_dir).path.absolute())
    original = read_facts(found)
    manifest = json.loads(found.manifest.read_text())
    config, reasons = _configuration(found)
    if config is None:
        return _told(request, _refusal(found, reasons))
    folder = request.build_dir / FOLDER
    config, build_dir = with_data(config, request.data, folder, request.build_dir)
    plan = scratch_plan(config, [found.path.name], folder, build_dir)
    edits = found.code_diff
    code = [] if request.force else _other_code(original)
    if code and edits.exists() and has_commit(str(manifest["code"]["git_sha"])):
        return _in_its_own_tree(request, found, manifest, original)
    reasons += _here(plan, original)
    if request.force or not reasons:
        reasons += _data(config, build_dir, original)
    if reasons and not request.force:
        more = _way_back(found, request.data, manifest["code"]) if code else []
        return _told(request, _refusal(found, [*reasons, *more]))
    for reason in reasons:
        say("WARN", f"forced although {reason}")
    settings = json.loads(found.resolved_config.read_text())["settings"]
    if exit_code := train_scratch(plan, settings, anew=request.force):
        return exit_code, ""
    return _told(request, _judged(original, read_facts(RunDir(plan.runs[0].path)), reasons))


def train_twice(
    build_dir: Path, run: str = "", defconfig: str = "", steps: str = "", *, json: bool = False
) -> tuple[int, str]:
    """Train one configuration twice and compare; exit code and text.

    That of ``run``, of ``defconfig``, else of .config: of a study its first run, or the first of
    ``steps``. Both directories are kept below the build folder.
    """
    config = _asked(build_dir, run, defconfig, steps)
    plan = scratch_plan(config, ["first", "second"], build_dir / TWICE, build_dir)
    if exit_code := train_scratch(plan):
        return exit_code, ""
    first, second = (read_facts(RunDir(run.path)) for run in plan.runs)
    found = same_bytes(first, second, _looseness(first))
    return found.exit_code, to_json(found) if json else to_text(found)


def _asked(build_dir: Path, run: str, defconfig: str, steps: str) -> Config:
    if run:
        config, reasons = _configuration(find_finished(run, build_dir))
        if config is None:
            raise ConfigError(*reasons)
        return config
    layers = defconfig_layers(ROOT, defconfig) if defconfig else config_layers(build_dir)
    config = make_plan(layers, build_dir, steps=steps).runs[0].config
    return Config.from_values(unobserved(config.values))


def _configuration(run: RunDir) -> tuple[Config | None, list[str]]:
    """The run's configuration under this code, and what of it is another here."""
    record = json.loads(run.resolved_config.read_text())
    try:
        config = Config.from_values(unobserved(record["symbols"]))
    except ConfigError as error:
        return None, [f"this code does not take its configuration: {p}" for p in error.problems]
    if config.hash8 == record["hash8"]:
        return config, []
    return config, [f"configuration: its identity was {record['hash8']}, here it is {config.hash8}"]


def _here(plan: Plan, original: Facts) -> list[str]:
    """What this machine and this tree have otherwise than the run had it."""
    target = Gpt2Target(plan, new_pool(plan))
    reasons = [_as_reason(difference) for difference in target.differences(original.run)]
    if fallbacks := original.observed["oom_fallbacks"]:
        reasons.append(f"oom_fallbacks: memory ran out while it was made, {fallbacks}")
    if plan.base.train.budget == "time":
        reasons.append("budget: it was in seconds, and how much fits in depends on the hour")
    return reasons


def _as_reason(difference: str) -> str:
    """torch and device say what they were; the rest are names of files."""
    return difference if " (was " in difference else f"code: {difference} is another file here"


def _other_code(original: Facts) -> list[str]:
    return other_files(ROOT, original.sources)


def _data(config: Config, build_dir: Path, original: Facts) -> list[str]:
    """Prepare the data where it is missing, and compare it with what the run was trained on."""
    folder = prepare(config.data, build_dir)
    digest = read_manifest(folder, config.data)["digest"]
    if digest == original.observed["data"]:
        return []
    return [f"data (was {original.observed['data'][:12]}, is {digest[:12]})"]


def _judged(original: Facts, again: Facts, reasons: list[str]) -> Comparison:
    """The same bytes are the same whatever else differs; a divergence needs equal conditions."""
    found = same_bytes(original, again, [*reasons, *_looseness(original)])
    if found.verdict != DIVERGED or reasons:
        return found
    if others := [str(difference) for difference in observed_differences(original, again)]:
        return replace(found, verdict=NOT_COMPARABLE, reasons=others)
    return found


def _looseness(facts: Facts) -> list[str]:
    """Why even the same machine need not come to the same bits again."""
    knob = "knobs.deterministic_algorithms"
    if facts.observed.get(knob) is False:
        return [f"{knob}: False, so two trainings need not agree"]
    return []


def _refusal(run: RunDir, reasons: list[str]) -> Comparison:
    return Comparison(str(run.path), "here", NOT_COMPARABLE, reasons=reasons)


def _way_back(run: RunDir, data: str, code: Mapping[str, Any]) -> list[str]:
    """How to get at the code that made the run; ``code`` is what its manifest says of it."""
    sha = str(code["git_sha"])
    if not has_commit(sha):
        return [f"its commit {sha} is not in this repository"]
    if code["dirty_tree"] is not False:
        return ["it was made with edits that nobody has kept: there is no code.diff beside it"]
    tree = f"../kablate-{sha[:8]}"
    words = ["make", "-C", tree, "reproduce", f"RUN={run.path}"]
    words += [f"DATA={Path(data).absolute()}"] if data else []
    return [f"its code is here, type: git worktree add {tree} {sha} && {shlex.join(words)}"]


def _in_its_own_tree(
    request: Request, run: RunDir, manifest: Mapping[str, Any], original: Facts
) -> tuple[int, str]:
    """Reproduce in a copy of the tree as it was, with the edits that were captured."""
    sha, edits = str(manifest["code"]["git_sha"]), run.code_diff
    folder = request.build_dir.absolute() / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder, prefix="source-") as scratch:
        tree = Path(scratch) / "tree"
        if reasons := _put_together(tree, sha, edits, original):
            return _told(request, _refusal(run, reasons))
        say("SOURCE", f"commit {sha[:12]} with the edits of {edits}")
        command = [sys.executable, str(tree / "scripts" / "reproduce.py")]
        command += ["-O", str(request.build_dir.absolute()), "--run", str(run.path)]
        command += ["--data", str(Path(request.data).absolute())] if request.data else []
        command += ["--json"] if request.json else []
        variables = {**os.environ, "PYTHONPATH": str(tree), "DIRTY": "y", "RUN": "", "DATA": ""}
        done = subprocess.run(
            command, cwd=tree, env=variables, stdout=subprocess.PIPE, text=True, check=False
        )
    return done.returncode, done.stdout


def _put_together(tree: Path, sha: str, edits: Path, original: Facts) -> list[str]:
    """Write the run's own tree into ``tree``; why that is not what made the run."""
    try:
        check_out(sha, edits, tree)
    except PreflightError as error:
        return [f"code: {problem}" for problem in error.problems]
    wrong = other_files(tree, original.sources)
    return [f"code: {name} is not what commit and code.diff give" for name in wrong]


def _told(request: Request, found: Comparison) -> tuple[int, str]:
    return found.exit_code, to_json(found) if request.json else to_text(found)
