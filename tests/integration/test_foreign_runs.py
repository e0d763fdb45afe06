"""Folders of runs that a stranger may have written: what of them reaches this machine."""

import argparse
import json
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpt2.config import Config
from gpt2.records.audit import audit
from gpt2.records.files import allowed_symbols
from gpt2.running.prolong import plan_prolonged
from gpt2.running.reproduce import reproduce, train_twice
from gpt2.running.trained_models import evaluate
from gpt2.study.plan import Plan
from gpt2.weights.trained import open_trained
from lib.config.dotconfig import ConfigWorkspace, read_constants
from lib.config.field import SymbolValue
from lib.config.tree import KconfigTree, member_values
from lib.errors import DataError, KablateError, PreflightError
from lib.project import ROOT
from lib.runs.run_dir import RunDir
from tests.integration.conftest import SINGLE, SMALL, Folder, set_up
from tests.lib.fabricated import reseal, seal

OWN = {"DATA_DIR": "my data", "TRACKER_PROJECT": "mine", "SLURM_OPTIONS": "--mem=1G", "JOBS": 2}


@pytest.fixture
def place(shared) -> Path:
    """Return a build folder with one finished run."""

    def train(folder: Folder) -> None:
        set_up(folder.path, **SINGLE, **OWN)
        code, _, stderr = folder.command("all")
        assert code == 0, stderr

    return shared("foreign", train).path


def only_run(place: Path) -> RunDir:
    (status,) = place.glob("results/*/*/status.json")
    return RunDir(status.parent)


def rewrite(run: RunDir, *, forged: bool = False, **symbols: SymbolValue) -> None:
    """Record other symbols; forged, with a matching identity, as by a stranger who computes it."""
    record = json.loads(run.resolved_config.read_text())
    record["symbols"] |= symbols
    if forged:
        config = Config.from_values(record["symbols"])
        record |= {"hash8": config.hash8, "identity": config.identity()}
    run.resolved_config.write_text(json.dumps(record))
    reseal(run)


def hostile(own: dict[str, SymbolValue]) -> dict[str, SymbolValue]:
    """Return another value for each symbol that may not be taken from a record."""
    values: dict[str, SymbolValue] = {"UNKNOWN_TO_THIS_VERSION": "/theirs"}
    members = {c.name: member_values(c) for c in KconfigTree().kconf.unique_choices}
    for name, value in own.items():
        if name in allowed_symbols():
            continue
        if name in members:
            values[name] = next(word for word in members[name] if word != value)
        elif isinstance(value, bool):
            values[name] = not value
        else:
            values[name] = value + 1 if isinstance(value, int) else f"/theirs/{name}"
    return values


class Caught(Exception):
    """A configuration has reached the work of a command, which ends here."""


def configurations(run: RunDir, place: Path, patch: pytest.MonkeyPatch) -> dict[str, Config]:
    """Return the configuration with which each command starts from a run's folder."""
    seen: list[Config] = []

    def stop_at(*given: Any, **named: Any) -> Any:
        (first,) = (each for each in given if isinstance(each, Config | Plan))
        seen.append(first.base if isinstance(first, Plan) else first)
        raise Caught

    # Imports transformers, which no other test of a worker may need.
    from gpt2.weights.export import export

    for place_of_work in (
        *("gpt2.running.reproduce.train_scratch", "gpt2.quantized.evaluate.evaluate_run"),
        *("gpt2.weights.export._write_tokenizer", "gpt2.records.audit._documents"),
    ):
        patch.setattr(place_of_work, stop_at)
    name = str(run.path)
    arguments = argparse.Namespace(run=name, seeds="", quant="none", json=False, build_dir=place)
    commands: dict[str, Callable[[], Any]] = {
        "reproduce": lambda: reproduce(name, place),
        "reproduce TWICE=1": lambda: train_twice(place, name),
        "prolong": lambda: stop_at(plan_prolonged(name, place, 5, []).base),
        "evaluate": lambda: evaluate(arguments),
        "generate": lambda: stop_at(open_trained(run, place).config),
        "export": lambda: export(run, place / "exported", place),
        "audit": lambda: audit(run, place),
    }
    for command in commands.values():
        with pytest.raises(Caught):
            command()
    return dict(zip(commands, seen, strict=True))


def test_no_command_takes_more_than_the_list_allows(place, monkeypatch):
    run = only_run(place)
    own = read_constants(ConfigWorkspace(ROOT, place))
    theirs = hostile(own)
    assert {"DATA_DIR", "SLURM_OPTIONS", "TRACKER_PROJECT", "ON_STUDY_DONE_CMD"} <= theirs.keys()
    rewrite(run, **theirs)
    changed_by_prolong = {"SINGLE_TRAINING", "RUN_MODE"}
    for command, config in configurations(run, place, monkeypatch).items():
        taken = {
            name: config.values.get(name)
            for name in theirs.keys() - changed_by_prolong
            if config.values.get(name) != own.get(name)
        }
        assert taken == {}, command
        assert config.values["N_EMBD"] == SMALL["N_EMBD"], command
    # Without a configuration, the defaults are taken.
    rewrite(run, DATA_DIR="/theirs", TRACKER_WANDB=True, TRACKER_PROJECT="theirs")
    for name in (".config", "config.py"):
        (place / name).unlink()
    shutil.copytree(place / "my data", place / "data")
    for command, config in configurations(run, place, monkeypatch).items():
        found = (config.data.data_dir, config.tracking.project, config.tracking.trackers)
        assert found == ("data", "", ()), command


def test_own_text_is_read_only_if_it_is_the_recorded_one(place, tmp_path):
    run, private = only_run(place), tmp_path / "private"
    private.mkdir()
    (private / "letters.txt").write_text("Nobody else may read this. " * 99)
    for recorded in (str(private), "text"):
        rewrite(run, forged=True, CUSTOM_PATH=recorded)
        before = sorted((place / "my data").iterdir())
        for start in (
            lambda: reproduce(str(run.path), place, force=True),
            lambda: train_twice(place, str(run.path)),
            lambda: plan_prolonged(str(run.path), place, 5, []),
        ):
            with pytest.raises(DataError) as caught:
                start()
            assert caught.value.codes == ["data.mismatch"]
            assert "CUSTOM_PATH" in str(caught.value)
            assert sorted((place / "my data").iterdir()) == before
        # The recorded text itself, after a change.
        (place / "text/0.txt").write_text("Something else. " * 9)


def test_initial_weights_are_read_only_if_they_are_the_recorded_ones(place, monkeypatch):
    run = only_run(place)
    name = f"run:{run.path.name}"
    other = RunDir(Path(shutil.copytree(run.path, place / "from weights")))
    rewrite(other, forged=True, INIT_FROM=name)
    with pytest.raises(PreflightError) as caught:
        train_twice(place, str(other.path))
    assert caught.value.codes == ["weights.mismatch"]
    manifest = json.loads(other.manifest.read_text())
    digest = manifest["artifacts"]["model.safetensors"]["sha256"]
    manifest["origin"]["sources"]["/anywhere/model.safetensors"] = digest
    other.manifest.write_text(json.dumps(manifest))
    monkeypatch.setattr("gpt2.running.reproduce.train_scratch", lambda *given: 7)
    assert train_twice(place, str(other.path)) == (7, "")


def test_a_run_of_a_former_version_is_audited_and_reproduced(place, monkeypatch):
    run = only_run(place)
    monkeypatch.setattr("gpt2.running.reproduce.train_scratch", lambda *given, anew: 7)
    for blocks, valid in ((False, True), (True, False)):
        rewrite(run, COMPILE_BLOCKS=blocks, COMPILE_EAGER_TWIN=True, GPU_WATTS=700)
        manifest = json.loads(run.manifest.read_text())
        seal(run, {key: manifest[key] for key in manifest.keys() - {"manifest_digest"}})
        assert audit(run, place).valid is valid
        code, text = reproduce(str(run.path), place)
        assert (code, "COMPILE_BLOCKS: recorded value y" in text) == ((7, False), (4, True))[blocks]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "logs.txt", "per_query.csv", "metrics.jsonl"]
)
def test_a_pipe_in_place_of_a_file_is_refused(place, name):
    run = only_run(place)
    (run.path / name).unlink(missing_ok=True)
    os.mkfifo(run.path / name)
    # Ends a test that waits for the writer of the pipe.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(60)
    try:
        assert not audit(run, place).valid
        if name == "model.safetensors":
            with pytest.raises(KablateError):
                open_trained(run, place)
    finally:
        signal.alarm(0)
