"""Commands that read a trained study, each as a user types it."""

import csv
import json
import math
import re
import signal
from pathlib import Path

import pytest

from gpt2.data.prepare import prepare_dataset
from gpt2.quantized.evaluate import evaluate_run
from gpt2.records.files import read_resolved_config
from lib.errors import EXIT_CONFIG, EXIT_DONE, EXIT_INVALID, DataError
from lib.runs.run_dir import RunDir
from tests.build_folder import write_build
from tests.integration.conftest import IN_PROCESS, SINGLE, SMALL, TRAINED, wait_for
from tests.json_rows import read_rows

CLAIM = """[[claim]]
name = "loss"
text = "the loss"
step = "baseline"
field = "val_loss"
value = "9.999"
"""


def test_i10_a_second_make_trains_nothing_and_rerun_makes_the_same_bytes(trained):
    paths = trained.runs(TRAINED)
    weights = [RunDir(path).weights.read_bytes() for path in paths]
    code, table, said = trained.command("all", STEPS=TRAINED)
    assert code == 0 and "3 of 3 done" in said and "TRAIN" not in said
    assert re.search(r"\| +1 \| pruned-50 .* n=1 .* 50\.0% \| done +\|", table)
    assert "the loss of token frequencies alone" in table
    results = trained.path / "results/ratio"
    assert table.startswith((results / "table.md").read_text())
    assert "results/ratio/report.html" in table.splitlines()[-1]
    assert "pruned-50" in (results / "report.html").read_text()

    code, _, said = trained.command("rerun", "pruned-50")
    assert code == 2 and "YES=1" in said
    code, _, said = trained.command("rerun", "pruned-50", YES="1")
    assert code == 0 and "baseline" not in said
    assert re.search(r"^RERUN .* pruned-50-s1-\w+\.old-", said, re.MULTILINE)
    assert [RunDir(path).weights.read_bytes() for path in paths] == weights


def test_a_study_starts_its_command_once_and_its_workers_never(trained):
    file = trained.path / "read"
    given = {"SET": f'ON_STUDY_DONE_CMD="tee -a {file}"', "STEPS": "0", "SEEDS": "1,2"}
    # As in a job of SLURM: a worker writes no report.
    for words, runs in ((["--worker"], []), ([], []), (["--seeds", "1-3"], ["done"] * 5)):
        code, _, said = trained.command("all", *words, **given)
        assert code == 0, said
        document = json.loads(file.read_text()) if file.exists() else {"runs": []}
        assert [run["state"] for run in document["runs"]] == runs


def test_audit_judges_by_name_and_by_folder(trained):
    code, _, said = trained.command("audit", RUNS="nonesuch*", STEPS=TRAINED)
    assert code == EXIT_CONFIG and "[run.not-found]" in said
    (path,) = trained.runs("full")
    # Folders beside the runs, such as that of the figures, are no runs.
    (path.parent / "figures").mkdir(exist_ok=True)
    for runs, count in (("full", 1), (f"{path.parent}/*", 3)):
        code, printed, said = trained.command("audit", RUNS=runs, STEPS=TRAINED)
        assert code == EXIT_DONE and f"VALID   {path}\n" in printed, printed + said
        assert printed.count("VALID") == count
    summary = RunDir(path).summary
    summary.write_text(summary.read_text().replace('"val_loss": ', '"val_loss": 1'))
    code, printed, _ = trained.command("audit", RUNS=str(path), JSON="1")
    (run,) = json.loads(printed)["runs"]
    assert code == EXIT_INVALID and not run["valid"] and run["findings"][0]["file"]
    code, table, _ = trained.command("report", STEPS=TRAINED)
    assert code == EXIT_DONE and "damaged" in table


def test_claims_that_are_true_false_and_of_damaged_runs(trained):
    """What holds a claim: tests/lib/report/test_claims.py."""
    file, outputs = trained.path / "claims.toml", trained.path / "paper"
    file.write_text(CLAIM)
    code, text, said = trained.command("claims", STEPS="0", OUT=str(outputs))
    assert code == 1 and "quoted 9.999, found " in text and "claims.toml:1" in text
    assert not outputs.exists() and "SKIP" in said
    (found,) = re.findall(r"found ([0-9.]+)", text)
    file.write_text(CLAIM.replace("9.999", found))
    code, text, said = trained.command("claims", STEPS="0", OUT=str(outputs), JSON="1")
    assert code == 0 and json.loads(text)["claims"][0]["problems"] == [], said
    assert {path.name for path in outputs.iterdir()} == {"claims.tex", "claims.md"}
    (run,) = trained.runs("0")
    (run / "per_query.csv").write_bytes((run / "per_query.csv").read_bytes() + b"\n")
    code, text, _ = trained.command("claims", STEPS="0")
    assert code == 4 and run.name in text


def test_an_evaluation_leaves_the_run_as_it_is(trained):
    (path,) = trained.runs("full")
    run, before = RunDir(path), files_of(path)
    code, table, said = trained.command("evaluate", RUN="full", QUANT="none,int8")
    assert code == 0, said
    assert f"EVAL    {run.per_query} " in said and "WARN" not in said
    assert [line.split()[0] for line in table.splitlines()] == [
        "weights",
        "trained",
        "none",
        "int8",
    ]
    again = run.evaluation("none")
    assert (again / "per_query.csv").read_bytes() == before["per_query.csv"]
    loss = json.loads(before["summary.json"])["final"]["val_loss"]
    same, rounded = (
        json.loads((run.evaluation(scheme) / "summary.json").read_text())["final"]["val_loss"]
        for scheme in ("none", "int8")
    )
    assert same == loss != rounded and abs(rounded - loss) < 0.01
    with open(run.evaluation("int8") / "per_query.csv", newline="") as stream:
        rows = list(csv.DictReader(stream))
    tokens = sum(int(row["n_tokens"]) for row in rows)
    assert math.fsum(float(row["nll_sum"]) for row in rows) / tokens == rounded
    assert files_of(path) == before

    (trained.path / "text/more.txt").write_text("And one more. " * 9)
    config = read_resolved_config(run)
    prepare_dataset(config.data, trained.path)
    with pytest.raises(DataError) as caught:
        evaluate_run(run, config, trained.path, "int8")
    assert caught.value.codes == ["data.mismatch"]


def files_of(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir() if file.is_file()}


def test_text_is_generated_and_interrupted(trained):
    prompt = "12 $(x) é"
    code, text, said = trained.command("generate", PROMPT=prompt, RUN="full", TOKENS="24", SEED="2")
    assert code == 0, said
    assert text.startswith(prompt) and text.endswith("\n") and len(text) > len(prompt) + 1
    assert "tok/s" in said and "tok/s" not in text
    process = trained.start("generate", "--run", "full", "--prompt", "12 ", "--tokens", "1000000")
    wait_for(lambda: len(process.stdout) >= 8, process)
    process.signal(signal.SIGINT)
    assert process.wait(60) == 130
    assert process.stdout.startswith("12 ") and process.stdout.endswith("\n")
    assert "interrupted" in process.stderr and "Traceback" not in process.stderr


def test_a_run_that_fell_silent_is_an_alarm(trained):
    """As one whose machine was lost an hour ago."""
    (run,) = map(RunDir, trained.runs("0"))
    status = json.loads(run.status.read_text())
    run.status.write_text(json.dumps(status | {"state": "RUNNING"}))
    (path,) = run.heartbeats().values()
    rows = [row | {"ts": row["ts"] - 3600} for row in read_rows(path)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, text, _ = trained.command("watch", STEPS="0")
    assert code == 1 and "stall: no heartbeat of rank 0 for" in " ".join(text.split())


def test_forks_of_one_run_are_a_study(trained):
    prolong = ("prolong", "baseline", "--iters", "4")
    code, table, said = trained.command(*prolong, "--count", "2")
    assert code == 0 and "forks of one run" in table, said
    more = ("--count", "2", "--set", "RECIPROCAL=y")
    code, text, said = trained.command(*prolong, *more, JSON="1")
    assert code == 0, said
    document = json.loads(text)
    rows = [(row["slug"], row["n"]) for row in document["rows"]]
    assert rows == [("unchanged", 2), ("reciprocal", 2)]
    (verdict,) = document["verdicts"]
    assert (verdict["name"], verdict["n"]) == ("reciprocal vs unchanged", 2)
    # As many seeds as a word needs, by the command that trains forks.
    command = "make prolong RUN=baseline ITERS=4"
    assert document["more_seeds"] == f"{command} COUNT=3"
    assert [c for c, _ in document["commands"] if c.startswith("make prolong")] == [
        f"{command} COUNT=2"
    ]
    assert not any(c.startswith(("make SEEDS", "make report")) for c, _ in document["commands"])
    code, text, _ = trained.command("ls", "--where", "state=done", JSON="1")
    studies = [run["study"] for run in json.loads(text)["runs"]]
    assert sum(study.startswith("prolonged-baseline-s1-") for study in studies) == 4

    code, _, said = trained.command(*prolong, "--from", "2")
    assert code == 0 and "continues with its state" in said, said
    (fork,) = trained.path.glob("results/prolonged-baseline-s1-*-2-4/unchanged-s1001-*")
    assert json.loads((fork / "status.json").read_text())["iteration"] == 4
    for command in (("audit", "--runs"), ("reproduce", "--run")):
        code, text, said = trained.command(*command, str(fork))
        assert code == 0, text + said
    code, _, said = trained.command(*prolong, "--from", "3")
    assert code == 2 and "[run.no-checkpoint]" in said and "2, 4" in said


def test_an_export_starts_another_training(trained):
    code, printed, said = trained.command("export", "ratio/00-baseline s1")
    assert code == 0, said
    out = Path(printed.strip())
    given = {**SMALL, **SINGLE, "INIT_FROM": f"hf:{out}"}
    write_build(trained.path, {name: value for name, value in given.items() if value is not None})
    code, _, said = trained.command("all")
    assert code == 0 and "INIT" in said and f"hf:{out}: " in said
    weights = RunDir(out).weights
    weights.write_bytes(weights.read_bytes()[:-1] + b"\0")
    code, _, said = trained.command("all")
    assert code == 2 and f"changed since: {weights}" in said and "ON_STALE=rerun" in said
    weights.unlink()
    code, _, said = trained.command(*IN_PROCESS, "--seed", "2")
    assert code == 3 and f"{weights}: " in said and "[weights.missing]" in said
