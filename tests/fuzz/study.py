"""The study that is damaged: two steps with a seed, and another seed that was killed."""

import json
import os
import signal
import time
from pathlib import Path

from gpt2.data.prepare import prepare_dataset
from gpt2.study.plan import config_layers, make_plan
from lib.config.field import SymbolValue
from tests.build_folder import write_build, write_texts
from tests.fuzz.harness import (
    CLAIMS,
    COMMANDS,
    FIGURES,
    IN_PROCESS,
    SEEDS,
    STEPS,
    UNFINISHED_SEED,
    Study,
    figures,
    load_mains,
    run_forked,
    start_forked,
)
from tests.integration.conftest import SMALL

SETTINGS: dict[str, SymbolValue] = {
    **SMALL,
    "DROPOUT": "0.0",
    "TELEMETRY_INTERVAL": 10,
    "EVAL_INTERVAL": 4,
    "CHECKPOINT_INTERVAL": 2,
    "BATCH_SIZE": 4,
    "GRAD_ACCUMULATION": 1,
    "MAX_ITERS": 8,
}


def trained_study(folder: Path) -> Study:
    """Train the study below ``folder``, kill one run, and remember every file and figure."""
    study = Study(folder, load_mains())
    tree = study.tree
    write_texts(tree)
    write_build(tree, SETTINGS)
    (tree / "claims.toml").write_text(CLAIMS)
    plan = make_plan(config_layers(tree), tree, steps=STEPS, seeds=SEEDS)
    process = os.fork()
    if process == 0:
        prepare_dataset(plan.base.data, tree)
        os._exit(0)
    os.waitpid(process, 0)
    for run in plan.runs:
        words = [*IN_PROCESS, run.variant.slug, "--seed", str(run.seed), "-O", str(tree)]
        outcome = run_forked(study.mains[words[0]], words, folder)
        assert outcome.code == 0, outcome.stderr
    study.a, study.b = (str(run.path) for run in plan.runs[:2])
    _kill_one(study)
    study.victim.write_text("victim")
    # Commands write files of their own the first time, such as table and report.
    for name in ("report", *FIGURES, "plan", "watch"):
        assert study.run(name).code in (0, 4), name
    study.remember()
    for name in FIGURES:
        outcome = study.run(name)
        study.figures[name] = dict(figures(json.loads(outcome.stdout)))
        study.restore()
    return study


def _kill_one(study: Study) -> None:
    """Train the run of the unfinished seed, and kill it after its second checkpoint."""
    script, *words = COMMANDS["train"]
    words = [script, *words, "-O", str(study.tree)]
    process = start_forked(study.mains[script], words, study.folder)
    pattern = f"results/*/*-s{UNFINISHED_SEED}-*/checkpoints/*"
    while sum(not p.name.startswith(".") for p in study.tree.glob(pattern)) < 2:
        assert os.waitpid(process, os.WNOHANG) == (0, 0), "ended before its second checkpoint"
        time.sleep(0.001)
    os.killpg(process, signal.SIGKILL)
    os.waitpid(process, 0)
