"""The benchmark trains the same sizes on every side, in turn. No test asserts a speed."""

import json
import math

import pytest
import torch

from gpt2.bench import step
from gpt2.bench.commands import step_table
from gpt2.config import Config
from gpt2.study.plan import config_layers, make_plan
from lib.config.field import SymbolValue
from tests.build_folder import write_build
from tests.integration.conftest import SINGLE, SMALL
from tests.lib.terminal import unaligned


@pytest.fixture
def configured(tmp_path):
    """Return a function that builds a small configuration."""

    def build(**changes: SymbolValue | None) -> Config:
        settings = {k: v for k, v in {**SMALL, **SINGLE, **changes}.items() if v is not None}
        folder = write_build(tmp_path, settings)
        return make_plan(config_layers(folder), folder).base

    return build


def test_every_side_is_the_same_gpt2(configured):
    """As many parameters as the baseline, and the loss of guessing before the first step."""
    config = configured(DROPOUT="0.0")
    shape = config.model.shape
    tokens_BT = torch.randint(shape.vocab_size, (2, shape.block_size + 1))
    plain = step.PlainGPT(shape)
    sides = {"nanogpt": (plain, plain(tokens_BT))}
    other = step.transformers_gpt(shape)
    sides["transformers"] = (other, step.transformers_loss(other, tokens_BT))
    for model, loss in sides.values():
        assert sum(p.numel() for p in model.parameters()) == config.model.num_params()
        assert float(loss.detach()) == pytest.approx(math.log(shape.padded_vocab_size), abs=0.3)


@pytest.mark.usefixtures("torch_as_before")
def test_every_side_trains_all_micro_batches(configured):
    config = configured(DROPOUT="0.0")
    tokens_BT = torch.randint(256, (2, 17))
    losses = []

    def loss(model, tokens):
        losses.append(model(tokens))
        return losses[-1]

    plain = step.PlainGPT(config.model.shape)
    run = step.plain_step(config, plain, loss, fused=True, tokens_BT=tokens_BT)
    for _ in range(4):
        run()
    assert len(losses) == 4 * config.train.grad_accumulation and losses[-1] < losses[0]


@pytest.mark.usefixtures("torch_as_before")
def test_sides_take_turns_after_a_warm_up(configured, monkeypatch):
    order = []
    names = ("trainer", "transformers", "nanogpt")
    steps = {name: lambda name=name: order.append(name) for name in names}
    monkeypatch.setattr(step, "sides", lambda config, device: steps)
    times = step.measure(configured(), 2)
    assert order == [*names] * 5 and {len(each) for each in times.values()} == {2}


def test_the_table_has_medians_and_ratios_within_rounds():
    times = {"trainer": [0.5, 0.4, 0.5], "nanogpt": [0.25, 0.4, 0.75]}
    text = unaligned(step_table(times, 1000))
    assert "| trainer | 500.0 | 2,000 | 1.00 (1.00 to 1.00) |" in text
    assert "| nanogpt | 400.0 | 2,500 | 1.00 (0.50 to 1.50) |" in text


@pytest.mark.slow
def test_the_command_line(build):
    folder = build(**SINGLE)
    python = folder.server.interpreter()
    words = ("--iters", "1", "--json", "--set", "RECIPROCAL=y")
    bench = folder.start("scripts/bench.py", *words, python=python)
    assert bench.wait() == 0, bench.stderr
    document = json.loads(bench.stdout)
    assert list(document["seconds"]) == ["nanogpt", "trainer", "transformers"]
    assert all(len(each) == 1 and each[0] > 0 for each in document["seconds"].values())


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("--iters", "0"), "usage.out-of-range"),
        (("--set", "DETECT_ANOMALY=y"), "config.conflict"),
        (("--set", "GPUS=2 BATCH_SIZE=1"), "config.conflict"),
    ],
)
def test_what_cannot_be_timed_is_refused(build, words, code):
    exit_code, _, said = build(**SINGLE).command("scripts/bench.py", *words)
    assert exit_code == 2 and f"[{code}]" in said
