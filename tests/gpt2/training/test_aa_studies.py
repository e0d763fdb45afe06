"""Studies in which nothing differs claim nothing: trained models, from initial weights to words."""

import pytest

from lib.report.study import read_study
from lib.runs.run import Run, RunVariant
from tests.lib.report.documents import document_of

STUDIES, SEEDS, ARMS = 20, 3, 4
# Nothing that the noise does not need.
PLAIN = {
    "DROPOUT": "0.0",
    "PRUNING_MAGNITUDE": None,
    "PRUNING_FREQUENCY": None,
    "OPTIMIZER_ADAMWSPAM": None,
    "EVAL_INTERVAL": 1000,
    "SAMPLE_TOKENS": 0,
    "MAX_ITERS": 40,
}


@pytest.mark.long
def test_three_renamed_baselines_over_three_seeds(configure, train):
    """The arms differ in INIT_STREAM only; each study has its own seeds."""
    claims = []
    for study in range(STUDIES):
        runs = []
        (train.folder / f"study{study}").mkdir()
        for seed in range(SEEDS * study + 1, SEEDS * (study + 1) + 1):
            for arm in range(ARMS):
                config = configure(**PLAIN, SEED=seed, INIT_STREAM=arm)
                name = f"study{study}/arm{arm}-s{seed}-{config.hash8}"
                path = train(config, name).files.path
                variant = RunVariant(f"arm{arm}", number=arm, parent="arm0" if arm else "")
                runs.append(Run(f"study{study}", variant, seed, config, path))
        verdicts = document_of(read_study(f"study{study}", runs))["verdicts"]
        counts = [(v["n"], v["planned_comparisons"]) for v in verdicts]
        assert counts == [(SEEDS, ARMS - 1)] * (ARMS - 1), verdicts
        claims.append(sum(v["verdict"] in ("BETTER", "WORSE") for v in verdicts))
    print(f"{sum(map(bool, claims))} of {STUDIES} studies claim a difference: {claims}")
    assert sum(map(bool, claims)) <= 4
