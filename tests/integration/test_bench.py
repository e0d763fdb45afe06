"""The benchmarks: sides, turns, figures and command lines. No test asserts a speed."""

import json
import math
import signal
import time

import pytest
import torch

from gpt2.bench import gpu, nsa, step
from gpt2.bench.timing import Case, Stopwatch, to_markdown
from gpt2.study.plan import config_layers, make_plan
from lib.errors import Problem, RunError
from tests.build_folder import write_build
from tests.integration.conftest import SINGLE, SMALL, wait_for
from tests.lib.terminal import unaligned

CPU = torch.device("cpu")
TINY = {
    "DEVICE_CPU": True,
    "PRECISION_FP32": True,
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
    "N_HEAD": 2,
    "N_EMBD": 96,
    "BLOCK_SIZE": 32,
    "TOKENIZER_BYTE": True,
    "BATCH_SIZE": 2,
    "GLOBAL_BATCH": 2,
    "COMPILE": False,
}


@pytest.mark.usefixtures("torch_as_before")
def test_every_side_is_the_same_gpt2_and_trains_all_micro_batches(tmp_path):
    """As many parameters as the baseline, and the loss of guessing before the first step."""
    settings = {**SMALL, **SINGLE, "DROPOUT": "0.0"}
    write_build(tmp_path, {name: value for name, value in settings.items() if value is not None})
    config = make_plan(config_layers(tmp_path), tmp_path).base
    shape = config.model.shape
    tokens_BT = torch.randint(shape.vocab_size, (2, shape.block_size + 1))
    plain, other = step.PlainGPT(shape, config.model.mlp.activation), step.transformers_gpt(shape)
    for model, loss in (
        (plain, plain(tokens_BT)),
        (other, step.transformers_loss(other, tokens_BT)),
    ):
        assert sum(p.numel() for p in model.parameters()) == config.model.num_params()
        assert float(loss.detach()) == pytest.approx(math.log(shape.padded_vocab_size), abs=0.3)
    losses = []

    def recorded(model, tokens):
        losses.append(model(tokens))
        return losses[-1]

    run = step.plain_step(config, plain, recorded, True, CPU)
    for _ in range(4):
        run()
    assert len(losses) == 4 * config.train.grad_accumulation and losses[-1] < losses[0]


def timed(sides, rounds=2, **limits):
    """Return the figures of sides, given as functions that build a step."""
    (result,) = Stopwatch(CPU, rounds, **limits).measure([Case("Table", "case", sides, 2)])
    return result


def test_sides_take_turns_after_a_warm_up_and_figures_are_medians_and_ratios_within_rounds(capsys):
    """A step that returns seconds has measured itself; here each does its work twice."""
    order, seconds = [], {"ours": [9] * 4 + [1.0, 0.8, 1.0], "theirs": [9] * 4 + [0.5, 0.8, 1.5]}

    def side(name):
        def step():
            order.append(name)
            return seconds[name].pop(0)

        return lambda: step

    result = timed({name: side(name) for name in seconds}, 3)
    assert order == ["ours"] * 4 + ["theirs"] * 4 + ["ours", "theirs"] * 3
    text = unaligned(to_markdown([result]))
    assert "| case | ours | 500.00 | 1.00 | 1.00 to 1.00 | |" in text
    assert "| case | theirs | 400.00 | 1.00 | 0.50 to 1.50 | |" in text
    progress = capsys.readouterr().err.splitlines()
    assert "case, ours   50%, eta" in progress[0] and "theirs   100%, eta 00:00" in progress[1]


def test_a_side_that_cannot_run_or_is_too_slow_is_a_line_and_the_others_are_measured():
    def absent():
        raise RunError(Problem("missing", "liger-kernel", "type: make setup", code="env.missing"))

    def broken():
        raise RuntimeError("no such kernel\nat line 1")

    def slow():
        time.sleep(30)

    began = time.monotonic()
    sides = {"a": absent, "b": broken, "c": lambda: lambda: None, "d": slow, "e": lambda: 0}
    result = timed(sides, limit_seconds=0.5)
    assert time.monotonic() - began < 20 and list(result["seconds"]) == ["c"]
    assert signal.getsignal(signal.SIGALRM) is signal.SIG_DFL
    text = to_markdown([result])
    assert "case, a: liger-kernel: missing" in text and "type: make setup" in text
    assert "case, b: no such kernel\n" in text
    assert "the limit of 0 s is reached [bench.time-limit]" in result["problems"]["d"]
    assert "[bench.time-limit]" in result["problems"]["e"]


@pytest.mark.usefixtures("torch_as_before")
def test_the_cases_of_a_gpu_at_tiny_sizes(monkeypatch):
    monkeypatch.setattr(gpu, "_ITERATIONS", 12)
    monkeypatch.setattr(torch, "compile", lambda function: function)
    heads = nsa.Heads(16, 1, 32, CPU)
    cases = [
        *gpu.step_cases(CPU, TINY),
        *gpu.sparse_cases(heads, 256),
        gpu.training_case(CPU, {**TINY, "GLOBAL_BATCH": 4}),
        gpu.fla_case(heads, 256),
        gpu.loss_case(CPU, 64, 32, 257),
    ]
    measured = list(Stopwatch(CPU, 1).measure(cases))
    sides = [name for each in measured for name in each["seconds"]]
    assert sides.count("nanoGPT") == sides.count("baseline") == 4
    assert {"ra", "full", "SDPA", "bare step", "training"} <= set(sides)
    assert sides[-3:] == ["compiled", "chunks", "F.cross_entropy, compiled"]
    assert all(seconds[0] > 0 for each in measured for seconds in each["seconds"].values())
    *missing, liger = [problem for each in measured for problem in each["problems"].items()]
    assert liger[0] == "liger-kernel"
    assert all("fla-core" in what and "pip install" in what for _, what in missing)


@pytest.mark.slow
def test_the_command_line(build):
    folder = build(**SINGLE)
    words = ("--iters", "1", "--json", "--set", "RECIPROCAL=y")
    bench = folder.start("bench", *words, python=folder.server.interpreter())
    assert bench.wait() == 0, bench.stderr
    (case,) = json.loads(bench.stdout)["cases"]
    assert list(case["seconds"]) == ["nanoGPT", "trainer", "transformers"]
    assert all(len(each) == 1 and each[0] > 0 for each in case["seconds"].values())
    for command, words, code in (
        ("bench", ("--iters", "0"), "usage.out-of-range"),
        ("bench", ("--set", "GPUS=2 BATCH_SIZE=1"), "config.conflict"),
        ("bench", ("--gpu", "h100"), "usage.out-of-range"),
        ("bench-nsa", ("--tokens", "100"), "usage.out-of-range"),
    ):
        status, _, said = folder.command(command, *words)
        assert status == 2 and f"[{code}]" in said


def test_sparse_attention_is_timed_and_ctrl_c_prints_what_is_measured(build):
    # Every block and the whole window are seen, and the compressed blocks besides.
    names = [case.name for case in nsa.nsa_cases(512, CPU)]
    assert len(names) == 10 and "n=8, w=256, 2,048 tokens, decoding" in names
    folder = build()
    bench = folder.start("bench-nsa", python=folder.server.interpreter())
    wait_for(lambda: "tokens, decoding" in bench.stderr, bench)
    bench.signal(signal.SIGINT)
    assert bench.wait(60) == 130, bench.stderr
    assert bench.processes() == []
    assert "of 40 cases" in bench.stderr and "Traceback" not in bench.stderr
    assert unaligned(bench.stdout).count("| n=16, w=512, 512 tokens, 0.49 times") == 4
