"""The two sides of ``make bench``, each timed in a separate process.

    python -m gpt2.bench.trainer_worker SIDE CASE THREADS STEPS BUILD_DIR

Prints the seconds of each timed step as JSON. ``ours`` is the trainer's step; ``plain`` is
transformers' GPT2LMHeadModel (SDPA) with torch's AdamW in a plain training loop. Both sides read
the same batches, clip the gradient norm at 1 and use the same optimizer settings.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gpt2 import train
from gpt2.bench.trainer import CASES, case_config
from gpt2.config import Config
from gpt2.data.sampler import TrainSampler
from gpt2.data.store import open_dataset
from gpt2.training.metrics import MetricsLog
from gpt2.training.records import RecordWriter
from gpt2.training.setup import open_session
from lib.runs.run_dir import RunDir

# In the first steps the allocator still grows.
_WARM_UP_STEPS = 3


def time_steps(step: Callable[[], None], steps: int) -> list[float]:
    """Return the seconds of each of ``steps`` calls, after a few warm-up calls."""
    seconds = []
    for count in range(_WARM_UP_STEPS + steps):
        start = time.perf_counter()
        step()
        if count >= _WARM_UP_STEPS:
            seconds.append(time.perf_counter() - start)
    return seconds


def time_trainer(config: Config, build_dir: Path, steps: int) -> list[float]:
    """Return the seconds of the trainer's steps, including data loading and logging."""
    with tempfile.TemporaryDirectory() as folder:
        records = RecordWriter(RunDir(Path(folder)), lambda event: None)
        session = open_session(config, build_dir, records)
        session.model.train()
        log, batches = MetricsLog(session), session.batches()
        seconds = time_steps(lambda: train.train_step(session, next(batches), log), steps)
        records.close()
    return seconds


def time_plain_loop(config: Config, build_dir: Path, steps: int) -> list[float]:
    """Return the seconds of a plain loop's steps, including data loading and ``loss.item()``."""
    from transformers import GPT2Config, GPT2LMHeadModel

    shape, optimizer = config.model.shape, config.optimizer
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

    return time_steps(step, steps)


def main() -> None:
    """Time one side of a case and print the seconds as JSON."""
    side, case, threads, steps, build_dir = sys.argv[1:]
    spec, settings, _ = CASES[case]
    config = case_config(spec, settings, int(threads))
    measure = {"ours": time_trainer, "plain": time_plain_loop}[side]
    sys.stdout.write(json.dumps(measure(config, Path(build_dir), int(steps))) + "\n")


if __name__ == "__main__":
    main()
