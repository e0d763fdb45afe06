"""Run profiles: their defaults, the settings they reject, and errors that list all problems."""

import pytest

from gpt2.check.cases import plan_cases
from gpt2.study.plan import make_plan
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from tests.errors import error_of

PAPER, FAST = "RUN_PROFILE_PAPER_REPRO", "RUN_PROFILE_MAXOUT_SPEED"


@pytest.fixture(scope="module")
def tree():
    return KconfigTree()


@pytest.fixture
def configure(tree):
    """Return a function that resolves symbols on top of the defaults."""

    def build(**settings):
        return resolve_config(tree, [ConfigLayer.of("defconfig", "test", settings)])

    return build


@pytest.mark.parametrize(
    ("profile", "strict", "defaults"),
    [
        (PAPER, True, ("fp32", "highest", "strict", False, False)),
        (FAST, False, ("fp32", "high", "off", True, False)),
    ],
)
def test_a_profile_decides_what_is_left_open(configure, profile, strict, defaults):
    """The table of docs/profiles.md."""
    config = configure(**{profile: True})
    names = ("precision", "matmul_precision", "deterministic", "cudnn_benchmark", "compile")
    assert tuple(vars(config.machine)[name] for name in names) == defaults
    assert config.repro.strict == strict and (config == configure()) == strict


@pytest.mark.parametrize(
    ("settings", "backend"),
    [
        ({PAPER: True}, "rows"),
        ({PAPER: True, "DEVICE_CPU": True}, "flash"),
        # The CPU's flash attention drops no weights.
        ({PAPER: True, "DEVICE_CPU": True, "DROPOUT": "0.1"}, "rows"),
        ({FAST: True}, "auto"),
    ],
)
def test_a_paper_names_its_kernel(configure, settings, backend):
    assert configure(**settings).model.attention.backend == backend


BF16 = {"PRECISION_BF16": True}
FP16 = {"PRECISION_FP16": True, "PRECISION_WHY": "x"}
MEDIUM = {FAST: True, "MATMUL_PRECISION_MEDIUM": True}
SELECTION = {"ATTENTION_BACKEND_TRITON": True, "RA_CROSS_TOKEN": True, "RA_CROSS_TOKEN_TOPK": 64}
GROUPED = {"ATTENTION_PROJECTION_GROUPED": True}
HEADS = {"MODEL_SIZE_CUSTOM": True, "N_HEAD": 0, "N_EMBD": 128}


@pytest.mark.parametrize(
    ("settings", "symbol", "code"),
    [
        ({"DETERMINISTIC_OFF": True}, "DETERMINISTIC: off", "config.profile-conflict"),
        ({"ATTENTION_BACKEND_AUTO": True}, "ATTENTION_BACKEND: auto", "config.profile-conflict"),
        (BF16, "PRECISION: bf16", "config.missing-reason"),
        (BF16 | {"PRECISION_WHY": "  "}, "PRECISION: bf16", "config.missing-reason"),
        (FP16, "PRECISION: fp16", "config.profile-conflict"),
        ({"MATMUL_PRECISION_HIGH": True}, "MATMUL_PRECISION: high", "config.missing-reason"),
        (MEDIUM, "MATMUL_PRECISION: medium", "config.missing-reason"),
        (SELECTION, "ATTENTION_BACKEND: triton", "attention.backend-unsupported"),
        *((GROUPED | {"N_KV_HEAD": n}, "N_KV_HEAD: ", "config.not-divisible") for n in (5, 24)),
        (
            {"DEVICE_CPU": True, "PRECISION_FP16": True},
            "PRECISION_FP16=y: ",
            "config.unmet-dependency",
        ),
        ({"SEED": -1}, "SEED=-1: ", "config.out-of-range"),
        ({"SEED_LIST": "1,-2"}, "SEED_LIST: ", "config.wrong-type"),
        ({"INIT_FROM": "hf:./gpt2", "INIT_STREAM": 1}, "INIT_STREAM: ", "config.conflict"),
        # A number has one spelling.
        *(
            ({"LEARNING_RATE": rate}, "LEARNING_RATE: ", "config.wrong-type")
            for rate in ("１e-3", "1_0", "01e-3", " 1", "1 ")
        ),
        *(({"LEARNING_RATE": n}, "LEARNING_RATE: ", "config.non-finite") for n in ("nan", "1e999")),
        # What did not take is not judged: the default of N_HEAD does not divide N_EMBD.
        (HEADS, "N_HEAD=0: ", "config.out-of-range"),
    ],
)
def test_a_rejected_setting_is_named_with_a_remedy(configure, settings, symbol, code):
    (problem,) = error_of(configure, **settings).problems
    assert symbol in problem.what and problem.code == code
    if code in ("config.profile-conflict", "config.missing-reason"):
        assert "type: SET=" in problem.next


def test_a_reason_is_enough(configure):
    reason = {"PRECISION_WHY": "the same within noise of three seeds"}
    bf16 = configure(PRECISION_BF16=True, **reason)
    assert bf16.repro.precision_why == reason["PRECISION_WHY"]
    reason = {"MATMUL_WHY": "run 3 against run 4"}
    assert configure(MATMUL_PRECISION_HIGH=True, **reason).machine.matmul_precision == "high"
    # The reason is not part of the identity.
    assert bf16.hash8 == configure(PRECISION_BF16=True, PRECISION_WHY="because").hash8


# Ranges, dependencies, rules of one section, rules across sections, and profile rules.
WRONG = {
    "SEED": -1,
    "DEVICE_CPU": True,
    "PRECISION_FP16": True,
    "MODEL_SIZE_CUSTOM": True,
    "N_HEAD": 4,
    "N_EMBD": 130,
    "DROPOUT": "2.0",
    "ATTENTION_PROJECTION_GROUPED": True,
    "N_KV_HEAD": 3,
    "GLOBAL_BATCH": 9,
    "LEARNING_RATE": "fast",
    "DETERMINISTIC_OFF": True,
    "ATTENTION_BACKEND_AUTO": True,
    "MATMUL_PRECISION_MEDIUM": True,
}
NAMED = {
    *("SEED=-1", "PRECISION_FP16=y", "N_EMBD", "N_KV_HEAD", "DROPOUT", "GLOBAL_BATCH"),
    *("LEARNING_RATE", "DETERMINISTIC", "ATTENTION_BACKEND", "MATMUL_PRECISION"),
}


@pytest.mark.parametrize("mode", ["SINGLE_TRAINING", "RA_MLA_ABLATION_MODE", "TEST_MATRIX_MODE"])
def test_all_problems_come_at_once_by_every_way_in(tmp_path, mode):
    layers = [ConfigLayer.of("defconfig", "test", {**WRONG, mode: True})]
    first, *others = (
        [problem.what for problem in error.problems]
        for error in (
            error_of(make_plan, layers, tmp_path),
            error_of(make_plan, layers, tmp_path, sweep="WARMUP_STEPS=1,2"),
            error_of(plan_cases, layers),
        )
    )
    assert others == [first, first]
    assert len(first) == len(NAMED) and {what.split(":")[0] for what in first} == NAMED
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "advice"),
    [
        ({"GLOBAL_BATCH": 64, "BATCH_SIZE": 8, "GPUS": 2}, ("GRAD_ACCUMULATION", 4)),
        ({"GLOBAL_BATCH": 8, "BATCH_SIZE": 8, "GPUS": 2}, ("BATCH_SIZE", 4)),
        ({"GLOBAL_BATCH": 8, "BATCH_SIZE": 4, "GPUS": 3}, ("GLOBAL_BATCH", 12)),
    ],
)
def test_the_advice_on_a_batch_resolves_the_conflict(configure, sizes, advice):
    sizes = {"GRAD_ACCUMULATION": 1, **sizes}
    (problem,) = error_of(configure, **sizes).problems
    assert problem.code == "config.conflict" and "{}={}".format(*advice) in problem.next
    assert configure(**sizes | dict([advice])).train.gpus == sizes["GPUS"]
