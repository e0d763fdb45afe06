"""Re-evaluation of a finished run from the command line, with and without quantization."""

import csv
import json
import math

import pytest

from gpt2.data.prepare import prepare_dataset
from gpt2.quantized.evaluate import evaluate_run
from gpt2.records.files import read_resolved_config
from lib.errors import DataError
from lib.runs.run_dir import RunDir
from tests.integration.conftest import IN_PROCESS, STEP

SCRIPT = "evaluate"


def test_re_evaluation_does_not_change_the_run(build):
    folder = build(MAX_ITERS=6)
    code, _, stderr = folder.command(*IN_PROCESS, STEP, "full")
    assert code == 0, stderr
    (path,) = folder.runs("full")
    run = RunDir(path)
    before = {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}

    code, table, stderr = folder.command(SCRIPT, RUN="full", QUANT="none,int8")
    assert code == 0, stderr
    assert f"EVAL    {run.per_query} " in stderr and "WARN" not in stderr
    again = run.evaluation("none")
    assert (again / "per_query.csv").read_bytes() == before["per_query.csv"]
    trained = json.loads(before["summary.json"])["final"]
    results = {
        s: json.loads((run.evaluation(s) / "summary.json").read_text()) for s in ("none", "int8")
    }
    assert results["none"]["final"] == {name: trained[name] for name in results["none"]["final"]}
    rounded = results["int8"]["final"]
    assert rounded["val_loss"] != trained["val_loss"]
    assert abs(rounded["val_loss"] - trained["val_loss"]) < 0.01
    assert results["int8"]["quantization"]["quantization_scheme"] == "int8"
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
    prepare_dataset(config.data, folder.path)
    with pytest.raises(DataError) as caught:
        evaluate_run(run, config, folder.path, "int8")
    assert caught.value.codes == ["data.mismatch"]
