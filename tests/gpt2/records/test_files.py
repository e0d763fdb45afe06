"""The list of recorded symbols that may reach this machine."""

import json
import re

import pytest

from gpt2.records.files import allowed_symbols, recorded_config, require_identity
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.gone import removed_symbols
from lib.project import ROOT
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

# Beginnings of names. A new symbol must be in one of the lists.
TAKEN = """
    ACTIVATION ADAM ATTENTION_ BATCH_SIZE BIAS BLOCK_SIZE BUDGET CHECK_NUMERICS COMPILE CPU_THREADS
    CUDNN_BENCHMARK CUSTOM_ DATASET DATA_PARALLEL DDP_SAFE DETECT_ANOMALY DETERMINISTIC DEVICE DROPOUT
    EVAL_ GLOBAL_BATCH GPT2_MAX_TIME GPUS GRAD_ INIT_ LATENT_ LEARNING_RATE LOSS_BACKEND LR_SCHEDULE
    MATMUL_ MAX_ MIN_LEARNING_RATE MLP_ MODEL_ MUON_ NORM NSA_ N_ OOM_ OPTIMIZER POSITIONS PRECISION PRUNING
    QK_NORM RA_CROSS_TOKEN RECIPROCAL ROPE_BASE RUN_PROFILE SAMPLE_ SEED SGD_ SLIDING_WINDOW SPAM_ STATISTICS_
    LORA TOKENIZER UNTIED_HEAD VALUE_RESIDUAL VAL_FRACTION VOCAB_MULTIPLE WARMUP_STEPS WEIGHT_DECAY WSD_ Z_LOSS
"""
NOT_TAKEN = """
    ABLATION_ CHECKPOINT_ COMPILE_EAGER_TWIN DATASET_LARGE DATA_DIR DRY_RUN ENV_ EXPANDABLE_SEGMENTS
    FINALIST_MIN_SEEDS FIRST_STEPS GPU_ JOBS LEASE_SECONDS LOADER_WORKERS LOG_INTERVAL
    LONG_RUN_ITERATIONS MIN_DISK_GIB ON_ OUTPUT_DIR PEAK_TFLOPS PIN_MEMORY
    PREFETCH_FACTOR RA_MLA_ABLATION_STEPS RUN_MODE RUN_TIME_LIMIT_SECONDS SEED_LIST SLURM_ SPLIT_GIVEN
    STALL_LIMIT_SECONDS TELEMETRY_ TEST_MATRIX_ TRACKER_ VERDICT_ WARMUP_ITERATIONS WATCH_
"""


def matching(names, beginnings):
    """Return the names that begin with one of the words."""
    pattern = re.compile("|".join(beginnings.split()))
    return {name for name in names if pattern.match(name)}


def test_it_is_decided_for_each_symbol_whether_it_may_be_taken():
    names = {item.name for item in KconfigTree().items()}
    refused = matching(names, NOT_TAKEN)
    assert names & allowed_symbols() == matching(names, TAKEN) - refused
    assert names - allowed_symbols() == refused


@pytest.fixture
def former(tmp_path):
    """Return a function that writes the record of a run of commit 478ca248, with some changes."""
    record = json.loads((ROOT / "tests/yardsticks/resolved_config.json").read_text())

    def write(**symbols):
        changed = {**record, "symbols": {**record["symbols"], **symbols}}
        (tmp_path / "resolved_config.yaml").write_text(json.dumps(changed))
        (tmp_path / "manifest.json").write_text(json.dumps({"code": {"git_sha": "1a2b3c4d" * 5}}))
        return RunRecord(RunDir(tmp_path))

    return write


def test_symbols_that_went_are_dropped_where_they_had_no_effect(former):
    gone = former().symbols.keys() - {item.name for item in KconfigTree().items()}
    assert {"COMPILE_BLOCKS", "COMPILE_EAGER_TWIN", "GPU_WATTS"} <= gone <= removed_symbols().keys()
    assert not gone & recorded_config(former()).values.keys()
    # A value that never mattered, and one of a setting that is not taken.
    for symbols in (
        {},
        {"COMPILE_EAGER_TWIN": True, "GPU_WATTS": 700, "ABLATION_DESIGN": "fractional"},
        {"ABLATION_FOLD": "RECIPROCAL", "VERDICT_SIMPLE_EFFECTS": True},
    ):
        require_identity(recorded_config(former(**symbols)), former(**symbols))


@pytest.mark.parametrize(
    ("name", "value"),
    [("COMPILE_BLOCKS", True), ("ATTENTION_BACKEND", "joined"), ("TOKENIZER", "runes")],
)
def test_a_value_that_went_is_refused_by_name_with_the_code_that_has_it(former, name, value):
    with pytest.raises(ConfigError) as caught:
        recorded_config(former(**{name: value}))
    (problem,) = caught.value.problems
    assert problem.code == "run.former-setting"
    recorded = "y" if value is True else value
    assert problem.what.startswith(f"{name}: recorded value {recorded}, which this version ")
    assert "git worktree add ../kablate-1a2b3c4d 1a2b3c4d" in problem.next
