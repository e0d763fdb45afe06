"""Training on two ranks gives the loss and the gradients of training on one.

B batch, T tokens.
"""

import contextlib
import hashlib
import io
import os
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo
import torch.distributed as dist

from gpt2.check.context import PEER_TIMEOUT_SECONDS, CheckContext
from gpt2.check.finding import CheckFinding, compare, expect, within
from gpt2.check.short_run import CHECKPOINT_STEP, RECORDED_STEPS, ShortRun
from gpt2.check.subject import StepUnderTest, relative_error
from gpt2.config import Config
from gpt2.data import dataset as data_sets
from gpt2.data.dataset import MANIFEST, open_dataset
from gpt2.data.loader import BatchLoader
from gpt2.data.prepare import try_preparation
from gpt2.data.sampler import TrainSampler
from gpt2.model import GPT
from gpt2.training import loop
from gpt2.training.resume import resume
from gpt2.training.state import build_state
from lib.env.process_group import ProcessGroup
from lib.env.ranks import ProcessRank
from lib.env.sharded import whole
from lib.errors import DataError, Problem
from lib.optim.optimizers import trainable_parameters
from lib.runs.checkpoint import weights_digest

_LENGTH = 17
_TOLERANCE = 1e-9
# Losses of micro-batches are added in fp32.
_LOSS_TOLERANCE = 1e-6
_TIMEOUT = timedelta(seconds=10)
_RANKS = 2


def check_parallel(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Compare a step of two ranks, with half the batch each, with one of the whole batch."""
    # The small form is of one process; the step's way to share the weights is that of several.
    config, how = subject.small_exact, subject.config.machine.data_parallel
    config = replace(config, machine=replace(config.machine, data_parallel=how))
    ids_BT, rendezvous = subject.tokens(2 * _RANKS, _LENGTH), subject.context.folder / "rendezvous"
    # Lists, because tensors would be sent as shared memory, which a forked peer cannot open.
    arguments = config, rendezvous, ids_BT.tolist()
    with contextlib.ExitStack() as failure:
        # After a failure, one process may have left the group, and the next step would fail too.
        failure.callback(subject.context.end_peer)
        peer = subject.context.peer.submit(train_rank, 1, *arguments)
        ranks = [train_rank(0, *arguments), peer.result(PEER_TIMEOUT_SECONDS)]
        failure.pop_all()
    digests, losses, gradients = zip(*ranks, strict=True)
    expected, same = "the same initial weights on both ranks", len(set(digests)) == 1
    yield from expect(same, "same-initial-weights", expected, "they differ")
    model = _initialized(config)
    whole_loss = model(ids_BT[:, :-1], ids_BT[:, 1:])
    whole_loss.backward()
    for rank, loss in enumerate(losses):
        what = f"on rank {rank}, as in one process, the loss"
        yield from compare("same-loss", what, loss, whole_loss.item(), _LOSS_TOLERANCE)
    for name, parameter in trainable_parameters(model).items():
        everywhere = all(found[name] is not None for found in gradients)
        expected = f"a gradient of {name} on both ranks"
        yield from expect(everywhere, "gradient-on-all-ranks", expected, "none")
        if everywhere and parameter.grad is not None:
            error = relative_error(torch.from_numpy(gradients[0][name]), parameter.grad)
            what = f"the gradient of {name} as in one process"
            yield from within("same-gradient", what, error, _TOLERANCE)


def train_rank(
    rank: int, config: Config, rendezvous: Path, rows: list[list[int]]
) -> tuple[str, float, dict[str, np.ndarray | None]]:
    """Return a digest of a rank's initial weights, and its loss and gradients after the all-reduce."""
    _join_group(rank, rendezvous)
    model = _initialized(config)
    digest = weights_digest(dict(model.named_parameters()))
    state = build_state(config, model, ProcessGroup(ProcessRank(rank, _RANKS)))
    parts = torch.tensor(rows[rank::_RANKS]).split(1)
    micro_batches = [(ids_BT[:, :-1], ids_BT[:, 1:]) for ids_BT in parts]
    loss = loop.accumulate_gradients(state, micro_batches).item()
    gradients = {
        n: None if p.grad is None else whole(p.grad).numpy() for n, p in model.named_parameters()
    }
    return digest, loss, gradients


def _join_group(rank: int, rendezvous: Path) -> None:
    """Join the peer's process group, once for all steps."""
    if dist.is_initialized():
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=_RANKS, timeout=_TIMEOUT
    )


def _initialized(config: Config) -> GPT:
    """Return the model with the trainer's initialization, in float64."""
    torch.set_num_threads(1)
    model = GPT(config.model)
    model.init_weights(config.seed, config.init.init_stream)
    return model.double()


# A checkpoint is complete: another process resumes from it with identical bits.


def check_reload(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Resume the traced run from its checkpoint in the peer, and compare the remaining steps."""
    traced = subject.traced_run
    arguments = (traced.config, subject.context.folder, traced.folder)
    peer = subject.context.peer.submit(resume_and_finish, *arguments)
    start, records, recorded, losses, digest, order = peer.result(PEER_TIMEOUT_SECONDS)
    final = weights_digest(traced.final_weights)
    rows = (
        ("resumed-step", "a resume at step", start, CHECKPOINT_STEP),
        ("resumed-records", "the records before a resume alone:", records, CHECKPOINT_STEP),
        ("resumed-records", "last evaluation and statistics", recorded, RECORDED_STEPS),
        ("resumed-loss", "after a resume, loss", losses, traced.losses[CHECKPOINT_STEP:]),
        ("resumed-weights", "after a resume, weights with digest", digest, final),
        ("resumed-data-order", "order of the data with digest", order, traced.data_order),
    )
    for row in rows:
        yield from compare(*row)


def resume_and_finish(config: Config, build_dir: Path, folder: Path) -> tuple[Any, ...]:
    """Resume a run and train it to its end, and return what ``check_reload`` compares."""
    run = ShortRun(config, build_dir, folder)
    session = run.session
    resume(session)
    start, records = session.iteration, session.run.metrics.read_bytes().count(b"\n")
    recorded = session.evaluated_at, session.statistics_at
    for _ in range(start, session.budget.iterations):
        run.step()
    session.records.close()
    return (
        start,
        records,
        recorded,
        run.losses,
        weights_digest(session.weights()),
        session.order.state_dict(),
    )


# Prepared data: intact, made by the configured tokenizer, and read as batches of the right shape.


_STEPS = 2


def check_data(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the data set and its first batches.

    Absent data is reported with the command that prepares it and is not a failure; damaged data is, and
    so is a text of the user that cannot be prepared.
    """
    data, shape, context = subject.config.data, subject.config.model.shape, subject.context
    try:
        folder = data_sets.dataset_folder(data, context.build_dir)
        if not (folder / MANIFEST).exists():
            tried = (data, context.build_dir, shape.block_size)
            context.once(tried, lambda: _try_preparation(context, *tried))
    except DataError as error:
        # No text is here, as on a machine that only checks.
        paths = [path for path in (data.custom_path, data.custom_val_path) if path]
        missing = any(not (context.build_dir / path).exists() for path in paths)
        if data.dataset != "custom" or not paths or missing:
            return [_absent(problem) for problem in error.problems[:1]]
        return _problems(error, "a text that can be prepared")
    prepared = (folder / MANIFEST).exists()
    try:
        dataset = open_dataset(data, context.build_dir)
        sampler = TrainSampler(dataset.train, shape.block_size, subject.config.seed)
    except DataError as error:
        if prepared:
            return _problems(error, "an intact data set", "intact-data")
        what = f"no prepared {data.dataset} with the {data.tokenizer} tokenizer"
        return [_absent(Problem(what, str(folder), "type: make data", code="data.missing"))]
    if not prepared:
        expected = f"no training without a prepared {data.dataset}"
        return [CheckFinding("no-substitute-data", expected, "another data set is opened")]
    return _batches(subject, sampler)


def _try_preparation(context: CheckContext, *tried: Any) -> None:
    """Try to split the text; one worker of all logs what it has to say of it."""
    ticket = hashlib.sha256(repr(tried).encode()).hexdigest()
    with contextlib.ExitStack() as quiet:
        if not context.is_first(ticket):
            quiet.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try_preparation(*tried)


def _problems(error: DataError, expected: str, name: str = "") -> list[CheckFinding]:
    """Return a finding for each problem, which has the problem's code unless it has a ``name``."""
    return [
        CheckFinding(name or problem.code, expected, " ".join(str(problem).split()))
        for problem in error.problems
    ]


def _batches(subject: StepUnderTest, sampler: TrainSampler) -> list[CheckFinding]:
    train, shape, data = subject.config.train, subject.config.model.shape, subject.small_exact.data
    sizes = train.global_batch, train.batch_size
    loader = BatchLoader(sampler, data, *sizes, 0, train.gpus, 0, False)
    expected = ((train.batch_size, shape.block_size),) * 2
    for _, micro_batches in zip(range(_STEPS), loader, strict=False):
        for x_BT, y_BT in micro_batches:
            shapes = tuple(x_BT.shape), tuple(y_BT.shape)
            largest, most = int(max(x_BT.max(), y_BT.max())), shape.vocab_size
            shifted = shapes[0] == shapes[1] and torch.equal(x_BT[:, 1:], y_BT[:, :-1])
            if findings := (
                compare("batch-shape", "shapes of tokens and targets", shapes, expected)
                + expect(largest < most, "token-range", f"tokens below {most}", f"token {largest}")
                + expect(shifted, "shifted-targets", "targets shifted by one token", "others")
            ):
                return findings
    return []


def _absent(problem: Problem) -> CheckFinding:
    location = f" ({problem.where})" if problem.where else ""
    text = f"{problem.what}{location}" + (f"; {problem.next}" if problem.next else "")
    return CheckFinding("prepared-data", "a prepared data set", text, absent=True)
