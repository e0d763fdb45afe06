"""Measurements of ``make bench``, each in a separate process that prints its figures as JSON.

    python -m gpt2.bench.trainer_worker side ours|plain CASE THREADS STEPS BUILD_DIR
    python -m gpt2.bench.trainer_worker mechanisms|optimizers THREADS ROUNDS

side: the seconds of each timed step. ``ours`` is the trainer's step; ``plain`` is transformers'
GPT2LMHeadModel (SDPA) with torch's AdamW in a plain training loop. Both sides read the same batches,
clip the gradient norm at 1 and use the same optimizer settings.

mechanisms: forward and backward time of every step of the RATIO study, relative to the baseline, in
two blocks of GPT-2's width on byte tokens, so that the blocks dominate and not the output head.

optimizers: update time and state size of every optimizer and of torch's fused AdamW, on GPT-2's
parameters. They step in turn on weights and gradients of the same shapes, without forward and
backward passes. AdamWPrune is AdamW with state pruning, which computes new masks in one of ten
updates.

B micro-batch, T tokens.
"""

import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from gpt2 import train
from gpt2.ablation import RATIO
from gpt2.ablation.resolve import resolve_study
from gpt2.bench.runner import take_turns, time_calls, within_rounds
from gpt2.bench.trainer import CASES, case_config
from gpt2.config import Config
from gpt2.data.sampler import TrainSampler
from gpt2.data.store import open_dataset
from gpt2.model import GPT
from gpt2.training.metrics import MetricsLog
from gpt2.training.records import RecordWriter
from gpt2.training.setup import open_session
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.optim.build import build_optimizer
from lib.optim.optimizers import parameter_groups
from lib.optim.options import OPTIMIZERS, AdamwOptions
from lib.project import ROOT
from lib.pruning.pruners import Pruner, build_pruner
from lib.runs.run_dir import RunDir

# In the first steps the allocator still grows.
_WARM_UP_STEPS = 3
# Tokens per sequence → number of sequences: about a thousand tokens in total.
SHAPES = {256: 4, 1024: 1}
_BLOCKS = 2
# The default interval of mask updates.
_UPDATES = 10
_LEARNING_RATE = 1e-4


def time_trainer(config: Config, build_dir: Path, steps: int) -> list[float]:
    """Return the seconds of the trainer's steps, including data loading and logging."""
    with tempfile.TemporaryDirectory() as folder:
        records = RecordWriter(RunDir(Path(folder)), lambda event: None)
        session = open_session(config, build_dir, records)
        session.state.model.train()
        log, batches = MetricsLog(session), session.batches()
        seconds = time_calls(
            lambda: train.train_step(session, next(batches), log), steps, _WARM_UP_STEPS
        )
        records.close()
    return seconds


def time_plain_loop(config: Config, build_dir: Path, steps: int) -> list[float]:
    """Return the seconds of a plain loop's steps, including data loading and ``loss.item()``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape, optimizer = config.model.shape, config.optimizer
    assert isinstance(optimizer, AdamwOptions)
    torch.set_num_threads(config.machine.cpu_threads)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=shape.vocab_size,
            n_positions=shape.block_size,
            n_embd=shape.n_embd,
            n_layer=shape.n_layer,
            n_head=shape.n_head,
            resid_pdrop=shape.dropout,
            embd_pdrop=shape.dropout,
            attn_pdrop=shape.dropout,
            # Not in the signature, but a documented keyword.
            attn_implementation="sdpa",
            bos_token_id=0,
            eos_token_id=0,
        )
    ).train()
    adamw = torch.optim.AdamW(
        model.parameters(),
        lr=config.schedule.learning_rate,
        betas=(optimizer.beta1, optimizer.beta2),
        weight_decay=optimizer.weight_decay,
    )
    split = open_dataset(config.data, build_dir, shape.vocab_size).train
    sampler = TrainSampler(split, shape.block_size, config.seed)
    bf16 = config.machine.precision == "bf16"
    sequences = 0

    def step() -> None:
        nonlocal sequences
        # transformers shifts the labels itself.
        windows = torch.from_numpy(sampler.sequences(sequences, config.train.global_batch))
        sequences += config.train.global_batch
        inputs = windows[:, : shape.block_size].contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        loss.item()

    return time_calls(step, steps, _WARM_UP_STEPS)


def distinct_configs(tokens: int) -> dict[str, Config]:
    """Return the steps with distinct models, by slug, at ``tokens`` context."""
    changes: dict[str, SymbolValue] = {
        "DEVICE_CPU": True,
        "TOKENIZER_BYTE": True,
        "MODEL_SIZE_CUSTOM": True,
        "N_LAYER": _BLOCKS,
        "N_HEAD": 12,
        "N_EMBD": 768,
        "BLOCK_SIZE": tokens,
        "DROPOUT": "0.0",
    }
    base = [
        *defconfig_layers(ROOT, "gpt2-quickstart"),
        ConfigLayer.of("command line", "bench", changes),
    ]
    configs = {s.step.slug: s.config for s in resolve_study(KconfigTree(), base, RATIO)}
    unique: dict[object, str] = {}
    for slug, config in configs.items():
        unique.setdefault(config.model, slug)
    return {slug: configs[slug] for slug in unique.values()}


def pass_seconds(model: GPT, tokens_BT: torch.Tensor) -> tuple[float, float]:
    """Return the seconds of one forward and one backward pass of the mean loss."""
    start = time.perf_counter()
    loss = model(tokens_BT[:, :-1], tokens_BT[:, 1:])
    forward = time.perf_counter()
    loss.backward()
    return forward - start, time.perf_counter() - forward


def time_mechanisms(tokens: int, rounds: int) -> dict[str, dict[str, tuple[float, ...]]]:
    """Return each step's time relative to the baseline of the same round, for all rounds."""
    models = {}
    for slug, config in distinct_configs(tokens).items():
        models[slug] = GPT(config.model)
        models[slug].init_weights(config.seed)
    tokens_BT = torch.randint(0, 256, (SHAPES[tokens], tokens + 1))
    # The first round warms up caches and allocator.
    times = take_turns(models, 1 + rounds, lambda model: pass_seconds(model, tokens_BT))
    baseline = times["baseline"][1:]
    return {
        slug: {
            name: within_rounds((t[part] for t in pairs[1:]), (t[part] for t in baseline))
            for part, name in enumerate(("forward", "backward"))
        }
        for slug, pairs in times.items()
    }


def time_optimizers(threads: int, rounds: int) -> dict[str, dict[str, float | list[float]]]:
    """Return the seconds of an update per round and the bytes of state by optimizer.

    The first entry is torch's fused AdamW.
    """

    # Builds one optimizer at a time: the states of all of them do not fit into memory together.
    def update(name: str) -> tuple[float, float]:
        optimizer, pruner = _build(name, threads)
        seconds = _update_seconds(optimizer, pruner)
        state_bytes = sum(_tensor_bytes(entry) for entry in optimizer.state.values())
        return seconds, state_bytes + _tensor_bytes(pruner.state_dict().get("masks", {}))

    sides = {name: name for name in ("torch fused AdamW", *OPTIMIZERS)}
    return {
        name: {"seconds": [seconds for seconds, _ in figures], "state_bytes": figures[-1][1]}
        for name, figures in take_turns(sides, rounds, update).items()
    }


def _build(name: str, threads: int) -> tuple[torch.optim.Optimizer, Pruner]:
    """Build an optimizer over new weights with random gradients, and the matching pruner."""
    registered = name in OPTIMIZERS
    settings: dict[str, SymbolValue] = {f"OPTIMIZER_{name.upper()}": True} if registered else {}
    if name == "adamwspam":
        # Enables spike clipping from the first steps on, as in a longer run.
        settings["SPAM_CLIP_DELAY"] = 1
    config = case_config("gpt2-124m+cpu", settings, threads)
    torch.manual_seed(0)
    model = GPT(config.model)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter) * 1e-3
    pruner = build_pruner(config.pruning, model)
    if not registered:
        return torch.optim.AdamW(model.parameters(), lr=_LEARNING_RATE, fused=True), pruner
    groups = parameter_groups(model, config.optimizer.weight_decay)
    return build_optimizer(config.optimizer, groups, _LEARNING_RATE), pruner


def _update_seconds(optimizer: torch.optim.Optimizer, pruner: Pruner) -> float:
    """Return the mean seconds of an update, after one update that creates the state."""
    for count in range(1 + _UPDATES):
        if count == 1:
            start = time.perf_counter()
        pruner.mask_gradients()
        optimizer.step()
        # A progress of 0.4 lies in the middle of the pruning ramp.
        pruner.after_step(count, 0.4, optimizer)
    return (time.perf_counter() - start) / _UPDATES


def _tensor_bytes(entry: Mapping[str, Any]) -> int:
    tensors = [tensor for tensor in entry.values() if isinstance(tensor, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def main() -> None:
    """Run one measurement and print its figures as JSON."""
    subject, *args = sys.argv[1:]
    if subject == "side":
        loop, case, threads, steps, build_dir = args
        spec, settings, _ = CASES[case]
        config = case_config(spec, settings, int(threads))
        measure = {"ours": time_trainer, "plain": time_plain_loop}[loop]
        figures: object = measure(config, Path(build_dir), int(steps))
    else:
        threads, rounds = args
        torch.set_num_threads(int(threads))
        if subject == "mechanisms":
            figures = {str(tokens): time_mechanisms(tokens, int(rounds)) for tokens in SHAPES}
        else:
            figures = time_optimizers(int(threads), int(rounds))
    sys.stdout.write(json.dumps(figures) + "\n")


if __name__ == "__main__":
    main()
