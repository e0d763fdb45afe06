"""The two sides of a comparison, each run in a process of its own, as its user would start it.

    python -m gpt2.bench.sides SIDE CASE THREADS STEPS BUILD_DIR

prints the seconds of each timed step as JSON. ``ours`` is the trainer's own step, ``plain`` is
transformers' GPT2LMHeadModel (SDPA) and torch's AdamW in the loop a user would write. Both read the
same batches, clip the gradient norm at 1 and train with the same optimizer settings.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

from gpt2 import train
from gpt2.bench.cases import CASES, configuration
from gpt2.config import Config
from gpt2.data.sampler import TrainSampler
from gpt2.data.store import open_dataset
from gpt2.training.log import Log
from gpt2.training.records import Records
from gpt2.training.start import open_session
from lib.rundir import RunDir

# The allocator still grows in the first steps.
_WARM_UP_STEPS = 3


def timed(step: Callable[[], None], steps: int) -> list[float]:
    """Seconds of each of ``steps`` calls, after a few that are not counted."""
    seconds = []
    for count in range(_WARM_UP_STEPS + steps):
        start = time.perf_counter()
        step()
        if count >= _WARM_UP_STEPS:
            seconds.append(time.perf_counter() - start)
    return seconds


def ours(config: Config, build_dir: Path, steps: int) -> list[float]:
    """Seconds of the trainer's steps, data and log included."""
    with tempfile.TemporaryDirectory() as folder:
        records = Records(RunDir(Path(folder)), lambda event: None)
        session = open_session(config, build_dir, records)
        session.model.train()
        log, batches = Log(session), session.batches()
        seconds = timed(lambda: train.step(session, next(batches), log), steps)
        records.close()
    return seconds


def plain(config: Config, build_dir: Path, steps: int) -> list[float]:
    """Seconds of a plain loop's steps, data and ``loss.item()`` included."""
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
    done = 0

    def step() -> None:
        nonlocal done
        # transformers shifts the labels itself.
        windows = torch.from_numpy(sampler.sequences(done, config.train.global_batch))
        done += config.train.global_batch
        inputs = windows[:, : shape.block_size].contiguous()
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad()
        loss.item()

    return timed(step, steps)


def main() -> None:
    """The command line."""
    side, case, threads, steps, build_dir = sys.argv[1:]
    spec, settings, _ = CASES[case]
    config = configuration(spec, settings, int(threads))
    measure = {"ours": ours, "plain": plain}[side]
    sys.stdout.write(json.dumps(measure(config, Path(build_dir), int(steps))) + "\n")


if __name__ == "__main__":
    main()
