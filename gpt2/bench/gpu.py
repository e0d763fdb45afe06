"""Cases of a GPU, beside the forms of others: steps of GPT-2 124M, the loss, and sparse attention.

C n_embd, X tokens, V vocabulary; B, T, N, H as in the other modules.
"""

import importlib.util
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.bench.commands import Symbols, ratio_layers, step_config
from gpt2.bench.nsa import Heads, nsa_options, prefill_cases
from gpt2.bench.step import nanogpt_step, trainer_step
from gpt2.bench.timing import Build, Case, Step
from gpt2.loss import fused_loss, linear_cross_entropy, masked_cross_entropy
from gpt2.running.backend import Gpt2Backend
from gpt2.running.preflight import check_data
from gpt2.study.plan import config_layers, make_plan
from gpt2.training.loop import train_run
from lib.config.dotconfig import ConfigWorkspace, write_constants
from lib.config.tree import KconfigTree
from lib.errors import Problem, RunError
from lib.project import ROOT
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir, State

_ITERATIONS = 40
_LENGTHS = (8192, 16384, 65536)


def step_cases(device: torch.device, symbols: Symbols) -> list[Case]:
    """Return the cases of a step, eager and compiled, with and without dropout."""
    cases = []
    for dropout, is_compiled in (("0.1", True), ("0.0", True), ("0.1", False), ("0.0", False)):
        changes = {"COMPILE": is_compiled, "DROPOUT": dropout, **symbols}
        baseline = step_config("baseline", changes)
        sides: dict[str, Build] = {
            "baseline": partial(trainer_step, baseline, device),
            "nanoGPT": partial(nanogpt_step, baseline, device),
        }
        if is_compiled and dropout == "0.1":
            for slug in ("ra", "full"):
                sides[slug] = partial(trainer_step, step_config(slug, changes), device)
        form = "compiled" if is_compiled else "eager"
        cases.append(Case("A step, of one micro-batch", f"{form}, dropout {dropout}", sides))
    return cases


def training_case(device: torch.device, symbols: Symbols) -> Case:
    """Return the case of a training on drawn tokens, by its mean step after the first ones."""
    # Bytes, because the vocabulary of GPT-2 would be downloaded.
    two = {"GRAD_ACCUMULATION": 2, "GLOBAL_BATCH": 64, "TOKENIZER_BYTE": True, **symbols}

    def train() -> Step:
        with tempfile.TemporaryDirectory() as name:
            seconds = train_on_drawn_tokens(Path(name), two)
        return lambda: seconds

    sides: dict[str, Build] = {
        "bare step": partial(trainer_step, step_config("baseline", two), device),
        "training": train,
    }
    return Case("The trainer", f"{_ITERATIONS} iterations of two micro-batches of bytes", sides)


def train_on_drawn_tokens(folder: Path, symbols: Symbols) -> float:
    """Train the baseline below ``folder``; return the mean seconds of a step after the first ones."""
    for seed, split in enumerate(("train", "val")):
        drawn = np.random.default_rng(seed).integers(256, size=1 << 20, dtype=np.uint16)
        drawn.tofile(folder / f"{split}.bin")
    changes = {
        "DATASET_CUSTOM": True,
        "CUSTOM_FORMAT_BIN": True,
        "CUSTOM_PATH": str(folder),
        "EVAL_TOKENS": 1024,
        "WARMUP_STEPS": 1,
        "MAX_ITERS": _ITERATIONS,
        **dict.fromkeys(("EVAL_INTERVAL", "SAMPLE_TOKENS", "CHECKPOINT_INTERVAL"), 0),
        **symbols,
    }
    tree, place = KconfigTree(), ConfigWorkspace(ROOT, folder)
    resolution = tree.resolve(ratio_layers(changes))
    tree.write_config(resolution, place.config)
    write_constants(resolution, place)
    plan = make_plan(config_layers(folder), folder, steps="baseline", seeds="1")
    (run,) = plan.runs
    check_data([run.config], folder)
    run.path.mkdir(parents=True)
    Gpt2Backend(plan).write_inputs(run)
    status = train_run(run.path, folder, lambda event: None, lambda: False)
    if status.state is not State.SUCCESS:
        raise RunError(Problem(status.message, code="process.failed"))
    return RunRecord(RunDir(run.path)).timing.mean_step_seconds


def loss_case(device: torch.device, tokens: int, width: int, vocab_size: int) -> Case:
    """Return the case of the loss and its gradients; the head has padding rows."""
    padded = -(-vocab_size // 64) * 64

    def side(form: Callable[[], Callable[..., Tensor]]) -> Step:
        loss = form()
        torch.manual_seed(0)
        hidden_XC = torch.randn(tokens, width, device=device, requires_grad=True)
        weight_VC = (torch.randn(padded, width, device=device) * 0.02).requires_grad_()
        targets_X = torch.randint(vocab_size, (tokens,), device=device)

        def step() -> None:
            with torch.autocast(device.type, torch.bfloat16):
                value = loss(hidden_XC, weight_VC, targets_X, vocab_size)
            torch.autograd.grad(value, (hidden_XC, weight_VC))

        return step

    def plain(hidden_XC: Tensor, weight_VC: Tensor, targets_X: Tensor, vocab_size: int) -> Tensor:
        return F.cross_entropy(F.linear(hidden_XC, weight_VC)[:, :vocab_size].float(), targets_X)

    forms: dict[str, Callable[[], Any]] = {
        "compiled": lambda: torch.compile(masked_cross_entropy),
        "chunks": lambda: linear_cross_entropy,
        "liger-kernel": lambda: partial(linear_cross_entropy, fused=fused_loss("triton", device)),
        "F.cross_entropy, compiled": lambda: torch.compile(plain),
    }
    sides = {name: partial(side, form) for name, form in forms.items()}
    return Case("The loss", f"{tokens:,} tokens of {vocab_size:,}", sides)


def sparse_cases(heads: Heads, tokens: int) -> list[Case]:
    """Return the cases of sparse attention with blocks of 64, beside full attention.

    Compressed and selected branch, as kernels of other libraries have them.
    """
    options = nsa_options(
        NSA_BRANCH_WINDOW=False, NSA_PHI_MEAN=True, NSA_COMPRESS_BLOCK=64, NSA_COMPRESS_STRIDE=64
    )
    table = f"Sparse attention, {heads.query} heads of {heads.width} over {heads.key}"
    return prefill_cases(table, "compressed and selected", options, heads, tokens)


def fla_case(heads: Heads, tokens: int) -> Case:
    """Return the case of flash-linear-attention, which chooses its kernels for over a minute."""
    _, both = sparse_cases(heads, tokens)

    def fla() -> Step:
        if importlib.util.find_spec("fla") is None:
            fix = "type: .venv/bin/pip install fla-core"
            what = "the package is missing"
            raise RunError(Problem(what, "fla-core", fix, code="env.missing-package"))
        from fla.ops.nsa.parallel import parallel_nsa

        q, k, v = (
            heads.draw(n, tokens).transpose(1, 2).contiguous().requires_grad_()
            for n in (heads.query, heads.key, heads.key)
        )
        gate = torch.ones(q.shape[:3], device=q.device, dtype=q.dtype)
        grad_output, sizes = torch.ones_like(q), {"block_counts": 16, "block_size": 64}

        def step() -> None:
            for _ in range(heads.calls):
                out = parallel_nsa(q, k, v, gate, gate, None, window_size=0, **sizes)
                torch.autograd.grad(out, (q, k, v), grad_output)

        return step

    name = f"{tokens:,} tokens, forward + backward, beside fla-core"
    return Case(both.table, name, {"NSA": both.sides["NSA"], "fla-core": fla}, heads.calls)


def gpu_cases(device: torch.device) -> list[Case]:
    """Return all cases, those that take long last."""
    heads = Heads(64, 4, 128, device)
    return [
        *step_cases(device, {}),
        loss_case(device, 32768, 768, 50257),
        *(case for tokens in _LENGTHS for case in sparse_cases(heads, tokens)),
        training_case(device, {"COMPILE": True, "DROPOUT": "0.1"}),
        fla_case(heads, _LENGTHS[0]),
    ]
