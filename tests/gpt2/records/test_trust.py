"""The list of recorded symbols that may reach this machine."""

import re

from gpt2.records.trust import allowed_symbols
from lib.config.tree import KconfigTree

# Beginnings of names. A new symbol must be in one of the lists.
TAKEN = """
    ACTIVATION ADAM ATTENTION_ BATCH_SIZE BIAS BLOCK_SIZE BUDGET CHECK_NUMERICS COMPILE CPU_THREADS
    CUDNN_BENCHMARK CUSTOM_ DATASET DATA_PARALLEL DDP_SAFE DETECT_ANOMALY DETERMINISTIC DEVICE DROPOUT
    EVAL_ GLOBAL_BATCH GPT2_MAX_TIME GPUS GRAD_ INIT_ LATENT_ LEARNING_RATE LOSS_BACKEND LR_SCHEDULE
    MATMUL_ MAX_ MIN_LEARNING_RATE MLP_ MODEL_ NSA_ N_ OOM_ OPTIMIZER POSITIONS PRECISION PRUNING
    RA_CROSS_TOKEN RECIPROCAL ROPE_BASE RUN_PROFILE SAMPLE_ SEED SGD_ SLIDING_WINDOW SPAM_ STATISTICS_
    TOKENIZER VAL_FRACTION VOCAB_MULTIPLE WARMUP_STEPS WEIGHT_DECAY WSD_
"""
NOT_TAKEN = """
    ABLATION_ CHECKPOINT_ COMPILE_EAGER_TWIN DATASET_LARGE DATA_DIR DRY_RUN ENV_ EXPANDABLE_SEGMENTS
    FINALIST_MIN_SEEDS FIRST_STEPS GPU_ JOBS LEASE_SECONDS LOADER_WORKERS LOG_INTERVAL
    LONG_RUN_ITERATIONS MIN_DISK_GIB ON_ OUTPUT_DIR PEAK_TFLOPS PERSISTENT_WORKERS PIN_MEMORY
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
