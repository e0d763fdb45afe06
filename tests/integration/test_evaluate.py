"""A finished run evaluated again from the command line, with rounded weights and without."""

import csv
import json
import math

import pytest

from gpt2.data.prepare import prepare
from gpt2.quantized.evaluate import evaluate_run
from gpt2.runs import read_resolved_config
from lib.errors import DataError
from lib.rundir import RunDir

SCRIPT = "scripts/evaluate.py"


def test_evaluated_again_beside_the_runs_own_files(build):
    folder = build(MAX_ITERS=6)
    code, _, said = folder.command("scripts/train.py", "--steps", "full")
    assert code == 0, said
    (path,) = folder.runs("full")
    run = RunDir(path)
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}

    code, table, said = folder.command(SCRIPT, RUN="full", QUANT="none,int8")
    assert code == 0, said
    assert f"{run.per_query} is found again, byte for byte" in said
    again = run.evaluation("none")
    assert (again / "per_query.csv").read_bytes() == before["per_query.csv"]
    own = json.loads(before["summary.json"])["final"]
    found = {
        s: json.loads((run.evaluation(s) / "summary.json").read_text()) for s in ("none", "int8")
    }
    assert found["none"]["final"] == {name: own[name] for name in found["none"]["final"]}
    rounded = found["int8"]["final"]
    assert rounded["val_loss"] != own["val_loss"]
    assert abs(rounded["val_loss"] - own["val_loss"]) < 0.01
    assert found["int8"]["quantization"]["quantization_scheme"] == "int8"
    with open(run.evaluation("int8") / "per_query.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    tokens = sum(int(row["n_tokens"]) for row in rows)
    assert math.fsum(float(row["nll_sum"]) for row in rows) / tokens == rounded["val_loss"]
    assert [line.split()[0] for line in table.splitlines()] == [
        "weights",
        "trained",
        "none",
        "int8",
    ]
    after = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}
    assert after == before

    (folder.path / "text/more.txt").write_text("And one more. " * 9)
    config = read_resolved_config(run)
    prepare(config.data, folder.path)
    with pytest.raises(DataError, match="the run was evaluated on"):
        evaluate_run(run, config, folder.path, "int8")
