"""Comparable runs pass make verify-results; one planted difference makes it fail.

The runs are trained once, in a repository whose commit is on a remote; those of the first seed are
tracked with W&B offline. Differences are planted in copies, whose digests are recomputed.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpt2.config import Config
from gpt2.records.verify import TrackerQuery, query_run_directory, tracker_query, verify
from gpt2.study.plan import config_layers, make_plan
from lib.files import write_json
from lib.report.checklist import FAIL, UNDECIDED, Checklist, CheckRow, failing_rows
from lib.runs.manifest import add_artifact_digests, write_manifest
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir
from lib.tracking.sources import WandbServerSource
from tests.command_server import CommandServer
from tests.integration.conftest import set_up
from tests.integration.tree import git
from tests.lib.fabricated import changed
from tests.loopback.wandb_server import WandbServer, serving
from tests.make_command import make

STEPS, SEEDS = "0,5", "1,2,3"
TRACKERS = {"TRACKER_WANDB": True, "TRACKER_WANDB_MODE_OFFLINE": True}


@dataclass
class Pair:
    """A repository, its build folder, and the trained runs of two steps."""

    tree: Path
    build: Path
    # All seeds, in the order of the plan.
    trained: list[RunDir]

    @property
    def runs(self) -> list[RunDir]:
        """Return the runs of the first seed."""
        return self.trained[:2]

    def make(self, *words: str, **variables: str) -> subprocess.CompletedProcess:
        """Run ``make verify-results`` in the repository."""
        # The interpreter has another tree installed; PYTHONPATH selects this one.
        given = {"PYTHONPATH": str(self.tree), "SEEDS": SEEDS, **variables}
        python = [f"PYTHON={sys.executable}", "-o", "setup"]
        return make("verify-results", *words, f"O={self.build}", *python, cwd=self.tree, **given)


@pytest.fixture(scope="session")
def pair(shared_folder, committed, server) -> Pair:
    folder = shared_folder("published", partial(publish, server, committed))
    build = folder / "build"
    plan = make_plan(config_layers(build), build, steps=STEPS, seeds=SEEDS)
    return Pair(folder / "tree", build, [RunDir(run.path) for run in plan.runs])


def publish(server: CommandServer, committed: Path, folder: Path) -> None:
    """Clone this tree, and train the runs with the clone."""
    tree, build = folder / "tree", folder / "build"
    git(folder, "clone", "-q", str(committed), "tree")
    # With a band this wide, a step that changes little is EQUIVALENT.
    set_up(build, **TRACKERS, VERDICT_BAND="0.5")
    environment = {k: v for k, v in os.environ.items() if k not in ("V", "JSON", "ALLOW_DIRTY")}
    environment |= {"PYTHONPATH": str(tree), "STEPS": STEPS}
    command = ["-m", "lib.kablate", "all", "-O", str(build)]
    for variables in ({"SEEDS": "1"}, {"SEEDS": SEEDS, "SET": "TRACKER_WANDB=n"}):
        code, _, said = server.run(command, environment | variables, folder, tree)
        assert code == 0, said
        assert "WARN" not in said


@pytest.fixture
def check(pair, monkeypatch) -> Callable[..., Checklist]:
    """Return a function that verifies runs declared to differ in reciprocal attention.

    One seed is enough, so that a planted difference concerns a single run of each step.
    """

    def found(
        *runs: RunDir,
        ask: TrackerQuery = query_run_directory,
        tree: Path = pair.tree,
        min_seeds: int = 1,
        axes: Set[str] = frozenset({"RECIPROCAL"}),
    ) -> Checklist:
        monkeypatch.setattr("lib.runs.code.ROOT", tree)
        records = [*map(RunRecord, runs)]
        return verify(records, {run.path: axes for run in runs}, ask, "test", min_seeds)

    return found


@pytest.fixture
def copies(pair, tmp_path) -> list[RunDir]:
    return [RunDir(Path(shutil.copytree(r.path, tmp_path / r.path.name))) for r in pair.runs]


def plant(
    run: RunDir,
    symbols: Mapping[str, Any] = {},
    manifest: Mapping[str, Any] = {},
    told: Mapping[str, Any] = {},
    rows: int | None = None,
) -> None:
    """Rewrite ``run`` as if trained and tracked with these values, with consistent digests.

    Of the evaluated documents, the first ``rows`` stay.
    """
    lines = run.per_query.read_text().splitlines(keepends=True)
    run.per_query.write_text("".join(lines[:rows]))
    resolved, facts = json.loads(run.resolved_config.read_text()), read_facts(run)
    record = json.loads(run.manifest.read_text())
    if symbols:
        config = Config.from_values(resolved["symbols"] | symbols)
        resolved |= {"symbols": dict(config.values), "identity": config.identity()}
        resolved["hash8"] = record["run"]["hash8"] = config.hash8
        record["config"]["config_digest"] = config.digest
        facts["symbols"] |= symbols
        write_json(run.resolved_config, resolved)
    facts["settings"] |= told
    write_json(run.tracker_facts, facts)
    write_manifest(run, add_artifact_digests(run, changed(record, **manifest)))


def read_facts(run: RunDir) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run.tracker_facts.read_text())
    return facts


def failing(found: Checklist) -> dict[str, CheckRow]:
    return {row.check: row for row in failing_rows(found["rows"])}


def test_a_fair_pair_passes_with_the_facts_to_publish(pair):
    done = pair.make()
    assert done.returncode == 0, done.stdout + done.stderr
    # Columns are padded to one width.
    table = re.sub(r" +\|", " |", done.stdout)
    assert "| PASS |" in table and "| FAIL |" not in table and "| UNKNOWN |" not in table
    for row in ("stability", "divergence", "verdicts", "A/A step", "document"):
        assert re.search(rf"^\| {row} \| PASS \|", table, re.MULTILINE), row
    assert re.search("^SKIP +54 runs ", done.stderr, re.MULTILINE)
    sha = git(pair.tree, "rev-parse", "HEAD").strip()
    for text in (
        f"| commit exists | PASS | {sha[:12]} |",
        "| commit is public | PASS | on origin/",
        "| seeds | PASS | 1, 2, 3 of each variant |",
        "declared to differ: RECIPROCAL",
        "4 sequences = 2 × 2 × 1, 64 tokens",
        "tokens: 256; ",
        "| compile | PASS | off |",
        "| evaluation | PASS | 3 documents, 64 tokens, batches of 2 |",
    ):
        assert text in table, text


@pytest.fixture(scope="module")
def access(pair) -> Iterator[tuple[WandbServer, dict[str, str]]]:
    """Upload the offline runs to a server; return it, and the variables that select it."""
    with serving() as wandb_server:
        variables = {"WANDB_BASE_URL": wandb_server.url, "WANDB_API_KEY": "k" * 40}
        folders = [str(path) for r in pair.runs for path in r.trackers.glob("wandb/offline-run-*")]
        sync = [sys.executable, "-P", "-m", "wandb", "sync", "-p", "kablate-ratio", *folders]
        subprocess.run(sync, check=True, env={**os.environ, **variables}, cwd=pair.build)
        yield wandb_server, variables


@pytest.fixture
def ask(access, monkeypatch) -> TrackerQuery:
    """Return a query of the server."""
    for name, value in access[1].items():
        monkeypatch.setenv(name, value)
    return tracker_query(WandbServerSource(""))


KNOB = dict.fromkeys(("requested", "resolved", "observed"), True)
COMPILED = {
    "symbols": {"COMPILE": True},
    "manifest": {"knobs__torch_compile_enabled": KNOB},
    "told": {"compile_model": True},
}
# Planted into the second run.
CONFOUNDS: dict[str, Any] = {
    "symbols": {"COMPILE": True, "BATCH_SIZE": 4, "GLOBAL_BATCH": 8}
    | {"BUDGET": "time", "GPT2_MAX_TIME": 60},
    "manifest": {
        **COMPILED["manifest"],
        "batch__global_sequences": 8,
        "batch__tokens_per_iteration": 128,
        "batch__micro_batch": 4,
        "code__dirty_tree": True,
        "code__git_sha": "0" * 40,
        "origin__device": "abacus",
        "hardware__cpu_model": "abacus",
        "data__digest": "0" * 64,
        "origin__torch": "1.0.0",
        "environment__packages__torch": "1.0.0",
        "environment__packages__fortune": "1.0",
    },
    "told": {"compile_model": True, "batch_size": 4, "max_time": 60, "data_digest": "0" * 64}
    | {"git_commit": "0" * 40, "learning_rate": 1.0, "seed": 7},
    "rows": -1,
}
# Row of the check, and its words.
NAMED = (
    ("compile", "COMPILE: no ("),
    ("effective batch", "BATCH_SIZE: 2 ("),
    ("training length", "BUDGET: iterations ("),
    ("hardware", "), abacus (ra-s1-"),
    ("data and preprocessing", "), 0000000"),
    ("evaluation", "documents: "),
    ("commit is clean", "uncommitted code"),
    ("commit exists", "000000000000 of ra-s1-"),
    ("software", "torch: 2."),
    ("software", "package fortune: 2.0 (baseline-s1-"),
    ("tracker", "learning_rate of ra-s1-"),
    ("tracker", ": tracker 7, run 1"),
)


def test_each_confound_is_refused_and_named(check, copies):
    plant(copies[0], manifest={"environment__packages__fortune": "2.0"})
    plant(copies[1], **CONFOUNDS)
    found = check(*copies)
    rows = failing(found)
    # Rows that depend on an existing commit.
    unknown = {"commit is public", "commit holds the code"}
    assert rows.keys() - unknown == {name for name, _ in NAMED} and found["exit_code"] == 4
    for name, words in NAMED:
        assert rows[name].verdict == FAIL and words in rows[name].what, name
        assert copies[1].path.name in rows[name].runs


def test_a_package_that_one_run_lacks_and_what_was_declared_may_differ(check, copies):
    package = {"environment__packages__fortune": "1.0"}
    plant(copies[1], **{**COMPILED, "manifest": {**COMPILED["manifest"], **package}})
    found = check(*copies, axes={"RECIPROCAL", "COMPILE"})
    assert failing(found) == {}
    what = {row.check: row.what for row in found["rows"]}
    assert what["compile"] == "off; declared to differ: COMPILE"


def test_a_key_that_nobody_has_is_unknown_and_not_equal(check, copies):
    for run in copies:
        facts = read_facts(run)
        write_json(
            run.tracker_facts, changed(facts, settings__warmup_steps=..., symbols__N_HEAD=...)
        )
        plant(run, manifest={"batch__accumulation": ..., "hardware__cpu_model": ...})
    found = check(*copies)
    rows = failing(found)
    assert found["exit_code"] == 4
    assert rows.keys() == {"tracker", "effective batch", "hardware"}
    assert {row.verdict for row in rows.values()} == {UNDECIDED}
    for run in copies:
        for what in (
            f"the tracker has no warmup_steps for {run.path.name}",
            f"the tracker has no N_HEAD for {run.path.name}",
            f"the manifest of {run.path.name} has no gradient_accumulation",
        ):
            assert what in rows["tracker"].what.split("; ")


def test_an_edit_that_is_not_sealed_and_missing_facts_are_found(check, copies):
    text = copies[1].summary.read_text()
    # Another length is damage of the run, which is refused before.
    digit = re.compile(r'(?<="val_loss": \d\.)\d')
    copies[1].summary.write_text(digit.sub(lambda found: str(9 - int(found[0])), text))
    copies[1].tracker_facts.unlink()
    rows = failing(check(*copies))
    assert {name: row.verdict for name, row in rows.items()} == {
        "records": FAIL,
        "tracker": UNDECIDED,
    }


def test_a_sealed_edit_is_found_by_what_the_tracker_was_told(check, copies, ask):
    plant(copies[1], {"LEARNING_RATE": "1e-3"}, told={"learning_rate": 1e-3})
    rows = failing(check(*copies, ask=ask))
    assert rows.keys() == {"tracker", "other settings and kernels"}
    name = copies[1].path.name
    for what in (f"learning_rate of {name}: tracker 0.0006, run 0.001", "LEARNING_RATE of "):
        assert what in rows["tracker"].what
    assert "manifest_sha256 of " in rows["tracker"].what and rows["tracker"].runs == [name]


def test_a_server_without_the_runs_is_unknown(check, pair, monkeypatch):
    with serving() as empty:
        monkeypatch.setenv("WANDB_BASE_URL", empty.url)
        monkeypatch.setenv("WANDB_API_KEY", "k" * 40)
        (row,) = failing(check(*pair.runs, ask=tracker_query(WandbServerSource("")))).values()
    assert (row.check, row.verdict) == ("tracker", UNDECIDED)
    assert f"no run of kablate-ratio in me at {empty.url} has the id of baseline-s1-" in row.what


def test_a_server_is_asked_for_its_own_settings(pair, access):
    wandb_server, variables = access
    for run in wandb_server.runs.values():
        run.config["batch_size"]["value"] = 64
    try:
        done = pair.make("SOURCE=wandb", "JSON=1", **variables, SEEDS="1")
    finally:
        for run in wandb_server.runs.values():
            run.config["batch_size"]["value"] = 2
    assert done.returncode == 2 and "code 4" in done.stderr
    assert re.search(r"batch_size of baseline-s1-\w+: tracker 64, run 2\b", done.stderr)
    document = json.loads(done.stdout)
    assert (document["source"], document["exit_code"]) == ("wandb", 4)
    verdicts = {row["check"]: row["verdict"] for row in document["rows"]}
    assert (verdicts.pop("tracker"), verdicts.pop("seeds")) == ("FAIL", "FAIL")
    assert set(verdicts.values()) == {"PASS"}


@pytest.fixture
def clone(pair, tmp_path) -> Path:
    """Return a clone of the repository."""
    git(tmp_path, "clone", "-q", str(pair.tree), "clone")
    return tmp_path / "clone"


@pytest.mark.parametrize(
    ("words", "verdict", "advice"),
    [
        (
            ("remove", "origin"),
            UNDECIDED,
            "type: git remote add origin URL && git push origin HEAD",
        ),
        (("set-url", "origin", "empty"), FAIL, "git push origin"),
    ],
)
def test_a_commit_that_was_not_pushed_is_not_public(
    check, pair, clone, tmp_path, words, verdict, advice
):
    git(tmp_path, "init", "-q", "--bare", "clone/empty")
    git(clone, "remote", *words)
    git(clone, "fetch", "-q", "--prune", "--all")
    found = check(*pair.runs, tree=clone)
    (row,) = failing(found).values()
    assert (row.check, row.verdict, found["exit_code"]) == ("commit is public", verdict, 4)
    assert advice in row.next


def test_another_commit_of_the_same_code_is_shown_and_passes(check, copies, clone):
    (clone / "README.md").write_text("Other words.\n")
    git(clone, "commit", "-q", "-a", "-m", "words")
    git(clone, "push", "-q", "origin", "HEAD:refs/heads/words")
    first, second = git(clone, "rev-parse", "HEAD~", "HEAD").split()
    plant(copies[1], manifest={"code__git_sha": second}, told={"git_commit": second})
    found = check(*copies, tree=clone)
    assert failing(found) == {}
    said = {row.check: row.what for row in found["rows"]}
    assert said["commit exists"] == f"{first[:12]}, {second[:12]}"
    assert said["commit is public"].startswith("on origin/")
    sources = json.loads(copies[1].manifest.read_text())["origin"]["sources"]
    plant(copies[1], manifest={"origin__sources": {**sources, "gpt2/training/loop.py": "0" * 64}})
    rows = failing(check(*copies, tree=clone))
    assert rows.keys() == {"code", "commit holds the code"}
    assert rows["commit holds the code"].what.endswith(": gpt2/training/loop.py")


def test_every_variant_needs_the_same_seeds(check, pair):
    baselines, others = pair.trained[::2], pair.trained[1::2]
    (row,) = failing(check(*baselines, *others[:2], min_seeds=2)).values()
    assert (row.check, row.verdict) == ("seeds", FAIL)
    assert row.what == ("variants have different seeds: seeds 1, 2, 3 (baseline), seeds 1, 2 (ra)")
    assert "make SEEDS=1,2,3 &&" in row.next
    # The numbers of seeds are equal.
    (row,) = failing(check(*baselines[:2], *others[1:], min_seeds=2)).values()
    assert row.what.endswith(": seeds 1, 2 (baseline), seeds 2, 3 (ra)")
    (row,) = failing(check(*baselines[1:], *others[1:], min_seeds=4)).values()
    assert row.what.startswith("too few seeds") and row.what.endswith("got seeds 2, 3)")
    assert "make SEEDS=1,2,3,4 &&" in row.next


def test_a_seed_counts_once(check, pair, copies):
    (row,) = failing(check(*pair.trained, *copies, min_seeds=3)).values()
    assert row.what == (
        "several runs of baseline with the same seed: 1; several runs of ra with the same seed: 1"
    )
    assert failing(check(*pair.trained, min_seeds=3)) == {}


def test_directories_declare_nothing_by_themselves(pair, copies):
    named = f"RUNS={copies[0].path} {copies[1].path}"
    done = pair.make(named)
    assert "REFUSE  other settings and kernels: RECIPROCAL: - (baseline-s1-" in done.stderr
    assert "EXIT    code 4" in done.stderr and ": 2 of " in done.stdout
    assert "## Publish" not in done.stdout
