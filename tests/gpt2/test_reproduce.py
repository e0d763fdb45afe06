"""Verdicts of make reproduce before and after the repeated run. Nothing is trained here."""

import json

import pytest

import gpt2.running.reproduce
from gpt2.data.dataset import read_manifest
from gpt2.data.prepare import prepare_dataset
from gpt2.records.files import write_resolved_config
from gpt2.running.reproduce import reproduce
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.env.gpu import cpu_model
from lib.files import sha256_file
from lib.project import ROOT
from lib.runs.code import installed_torch
from tests.integration.conftest import SMALL
from tests.lib.fabricated import MANIFEST, changed, reseal, write_run


@pytest.fixture(scope="module")
def tree():
    return KconfigTree()


@pytest.fixture
def made(tree, tmp_path, monkeypatch):
    """Return a function that writes a run as made by this tree and machine, with some changes."""
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / f"text/{i}.txt").write_text(f"{i} makes {i * i}, as anybody knows. " * 9)

    def make(manifest=None, **settings):
        given = {k: v for k, v in {**SMALL, **settings}.items() if v is not None}
        config = resolve_config(tree, [ConfigLayer.of("test", "test", given)])
        data = read_manifest(prepare_dataset(config.data, tmp_path))
        file = "gpt2/model.py"
        origin = {
            "torch": installed_torch(),
            "device": cpu_model(),
            "sources": {file: sha256_file(ROOT / file)},
        }
        facts = {**MANIFEST, "origin": origin, "data": data}
        run = write_run(tmp_path / "run", manifest=changed(facts, **(manifest or {})))
        write_resolved_config(run, config)
        reseal(run)
        return run

    return make


@pytest.fixture
def again(tmp_path, monkeypatch):
    """Return a function that calls reproduce with a fake training."""

    def reproduced(run, force=False, **rest):
        def train(plan, settings, *, anew):
            (planned,) = plan.runs
            facts = rest.pop("facts", {})
            record = json.loads(run.manifest.read_text())
            write_run(planned.path, manifest=changed(record, **facts), **rest)
            return 0

        monkeypatch.setattr(gpt2.running.reproduce, "train_scratch", train)
        code, told = reproduce(str(run.path), tmp_path, force=force, json=True)
        return code, json.loads(told)

    return reproduced


DIVERGED = {"losses": (3.5, 3.25)}
NOT_DETERMINISTIC = {"requested": False, "resolved": False, "observed": False}


@pytest.mark.parametrize(
    ("manifest", "repeated", "code", "verdict", "said"),
    [
        ({}, {}, 0, "BITWISE", ""),
        ({}, DIVERGED, 1, "DIVERGED", ""),
        # A divergence under other conditions is no verdict on the run.
        (
            {},
            {**DIVERGED, "facts": {"knobs__cpu_threads__observed": 2}},
            *(4, "NOT COMPARABLE", "knobs.cpu_threads: 1, 2"),
        ),
        (
            {"knobs__deterministic_algorithms": NOT_DETERMINISTIC},
            DIVERGED,
            *(1, "DIVERGED", "knobs.deterministic_algorithms: False"),
        ),
    ],
)
def test_the_verdict_on_a_repeated_run(made, again, manifest, repeated, code, verdict, said):
    found_code, found = again(made(manifest), **repeated)
    assert (found_code, found["verdict"]) == (code, verdict)
    words = [*found["labels"], *found["reasons"]]
    assert len(words) == bool(said) and all(word.startswith(said) for word in words)
    if verdict == "DIVERGED":
        assert (found["first"]["place"], found["first"]["field"]) == ("iteration 2", "loss")


def test_all_reasons_are_listed_and_a_forced_run_carries_them(made, again, tmp_path):
    facts = {
        "origin__torch": "1.0.0",
        "origin__device": "abacus",
        "origin__sources": {f"gpt2/{i}.py": "0" * 64 for i in range(7)},
        "code__git_sha": "0" * 40,
        "oom_fallbacks": [{"action": "micro-batch", "iteration": 3}],
        "earlier_divisions": [{"gpus": 2, "iterations": 3}],
    }
    run = made(facts, BUDGET_TIME=True, MAX_ITERS=None)
    code, found = again(run)
    assert code == 4
    words = "torch device code: oom_fallbacks: earlier_divisions: budget: commit"
    assert [reason.split(" ")[0] for reason in found["reasons"]] == words.split()
    assert found["reasons"][0].startswith("torch (was 1.0.0, is ")
    assert found["reasons"][2].startswith("code: gpt2/0.py, gpt2/1.py, ")
    assert found["reasons"][2].endswith(" and 2 more differ")
    assert found["reasons"][-1].startswith(f"commit {'0' * 40} ")
    assert not (tmp_path / "reproduced").exists()
    code, found = again(run, force=True)
    assert (code, found["verdict"], len(found["labels"])) == (0, "BITWISE", 6)


def test_missing_edits_and_other_data_are_reported(made, again, monkeypatch):
    monkeypatch.setattr(gpt2.running.reproduce, "has_commit", lambda sha: True)
    facts = {"origin__sources": {"gpt2/model.py": "0" * 64}}
    code, found = again(made({**facts, "code__dirty_tree": True}))
    assert code == 4 and "code.diff is missing" in found["reasons"][-1]
    code, found = again(made({"data__digest": "0" * 64}))
    assert code == 4 and found["reasons"][0].startswith("data (was 000000000000, is ")


def test_a_configuration_of_other_code(made, again):
    run = made()
    record = json.loads(run.resolved_config.read_text())
    symbols = {name: value for name, value in record["symbols"].items() if name != "N_LAYER"}
    for changes, words in (
        ({"hash8": "00000000"}, "(was 00000000)"),
        ({"symbols": symbols}, "N_LAYER"),
    ):
        run.resolved_config.write_text(json.dumps(record | changes))
        reseal(run)
        for force in (False, "symbols" in changes):
            code, found = again(run, force=force)
            assert code == 4 and words in found["reasons"][0]
            assert found["reasons"][0].startswith("configuration: ")
