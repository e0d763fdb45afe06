"""Steps of a study are paired: they differ in their changes, and in no random number.

Every stream is computed again from SEED and its purpose alone. B micro-batch, T tokens.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from gpt2.check.finding import CheckFinding, compare, expect
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.model import GPT
from gpt2.training import rng
from gpt2.training.loop import open_session
from gpt2.training.records import RecordWriter
from gpt2.training.state import TrainingSession
from lib.config.field import SymbolValue
from lib.env.process_group import ProcessGroup
from lib.env.ranks import ProcessRank
from lib.runs.run_dir import RunDir
from lib.units import first_of

# Elements of a matrix that are drawn again. torch draws normal values in groups of 16, and draws the
# last 16 of a matrix separately, so that only matrices beyond this size have this beginning.
_PREFIX = 32
_WHOLE = 64
_TOLERANCE = 1e-5
_OTHER_STATE = "another state of the generator: another seed, or numbers drawn before step 1"
# Settings that no stream of random numbers depends on, besides two processes.
_OTHER_SETTINGS: Mapping[str, SymbolValue] = {
    "GPUS": 2,
    # The second rank does not exist.
    "DATA_PARALLEL": "ddp",
    # Ranks, micro-batches and rows of one must not be confused.
    "GLOBAL_BATCH": 12,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 3,
    "EVAL_TOKENS": 128,
    "LOG_INTERVAL": 3,
    "GRAD_CLIP": "0.5",
}


def check_paired(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check initial weights, dropout and data of the traced run against SEED and the other steps."""
    traced, config = subject.traced_run, subject.small
    yield from _streams(config, traced.initial_weights)
    if not subject.parent:
        # The A/A step of a baseline draws every matrix from another stream.
        other = with_changes(config, INIT_STREAM=1)
        model = GPT(other.model)
        model.init_weights(other.seed, other.init.init_stream)
        yield from _streams(other, {name: p.detach() for name, p in model.named_parameters()})
    same = torch.equal(traced.dropout_start, _dropout_start(config.seed))
    expected = f"dropout from the beginning of the stream of SEED={config.seed} alone"
    yield from expect(same, "dropout-stream", f"{expected}, as in every step", _OTHER_STATE)
    yield from _data_order(subject)
    yield from _second_rank(subject)


def stream_key(seed: int, purpose: str) -> int:
    """Return the seed of a stream, as the manifest declares: 63 bits of SHA-256("SEED:PURPOSE")."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "big") >> 1


def _streams(config: Config, weights: Mapping[str, Tensor]) -> list[CheckFinding]:
    """Check that every matrix is drawn from its stream of SEED and INIT_STREAM, unless it is zero."""
    number, wrong = config.init.init_stream, []
    for name, matrix in weights.items():
        # Codes of a frozen base are those of matrices that were drawn.
        if matrix.ndim < 2 or ".codes." in name or not matrix.any():
            continue
        purpose = f"init-{number}/{name}" if number else f"init/{name}"
        generator = torch.Generator().manual_seed(stream_key(config.seed, purpose))
        flat = matrix.flatten()
        flat = flat if len(flat) <= _WHOLE else flat[:_PREFIX]
        drawn = torch.empty_like(flat).normal_(generator=generator)
        if not torch.allclose(flat / flat.norm(), drawn / drawn.norm(), rtol=0, atol=_TOLERANCE):
            wrong.append(name)
    seed = f"SEED={config.seed}, INIT_STREAM={number}"
    expected = f"initial {first_of(wrong)} drawn from the stream of {seed} and the name alone"
    return expect(not wrong, "initial-stream", expected, "values of another stream")


def _dropout_start(seed: int, purpose: str = "dropout") -> Tensor:
    """Return the state of a rank's generator before the first step."""
    return torch.Generator().manual_seed(stream_key(seed, purpose)).get_state()


def _offsets(subject: StepUnderTest, seed: int, numbers: range) -> list[int]:
    """Return the offsets of sequences, uniform among all windows of T + 1 tokens (Philox 4×64-10)."""
    windows = len(subject.context.train_tokens) - subject.small.model.shape.block_size
    key = stream_key(seed, "data")
    bits = (int(np.random.Philox(key=key, counter=number).random_raw()) for number in numbers)
    return [each * windows >> 64 for each in bits]


def _data_order(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the offsets that the traced run consumed, and the tokens of its next step."""
    session, batch = subject.traced_run.session, subject.small.train.global_batch
    seed, steps = subject.small.seed, session.iteration
    digest = hashlib.sha256()
    for step in range(steps):
        offsets = _offsets(subject, seed, range(step * batch, (step + 1) * batch))
        digest = hashlib.sha256(digest.digest() + np.array(offsets, dtype="<i8").tobytes())
    expected = f"the sequences of SEED={seed} in order, as in every step"
    if digest.hexdigest() != session.order.state_dict():
        return [CheckFinding("paired-data", expected, f"other offsets in {steps} steps")]
    offsets = _offsets(subject, seed, range(steps * batch, (steps + 1) * batch))
    return _tokens(subject, session, offsets, expected)


def _tokens(
    subject: StepUnderTest, session: TrainingSession, offsets: Sequence[int], expected: str
) -> list[CheckFinding]:
    """Check the tokens of the session's next step."""
    micro_batches, train = next(session.batches()), session.config.train
    sizes = [train.batch_size] * train.grad_accumulation
    found = [len(x_BT) for x_BT, _ in micro_batches]
    if findings := compare("micro-batches", "rows of micro-batches", tuple(found), tuple(sizes)):
        return findings
    tokens, length = subject.context.train_tokens, session.config.model.shape.block_size
    rows = np.stack([tokens[offset : offset + length + 1] for offset in offsets])
    rows_BT = torch.from_numpy(rows.astype("int64"))
    x_BT, y_BT = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    same = torch.equal(x_BT, rows_BT[:, :-1]) and torch.equal(y_BT, rows_BT[:, 1:])
    step = session.iteration + 1
    return expect(same, "paired-data", expected, f"other tokens in step {step}")


# A second rank, which differs from the traced run in its settings too.


class _SecondOfTwo(ProcessGroup):
    """Rank 1 of two, without the other rank; rank 0 is assumed to send what rank 1 sends."""

    def gather(self, row: Tensor) -> Tensor:
        """Return two copies of ``row``."""
        return torch.stack([row, row])

    def share_gradients(self, module: torch.nn.Module, safe: bool = False) -> torch.nn.Module:
        """Return ``module``."""
        return module


def _second_rank(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check weights, dropout and data of a second rank with another SEED and other settings."""
    context, seed = subject.context, subject.small.seed + 1
    config = with_changes(subject.small, SEED=seed, **_OTHER_SETTINGS)
    records, group = RecordWriter(RunDir(context.new_run_dir())), _SecondOfTwo(ProcessRank(1, 2))
    session = open_session(config, context.prepare_data(config), records, group=group)
    records.close()
    start, first = torch.get_rng_state(), _dropout_start(seed)
    yield from _streams(config, session.weights())
    different = not torch.equal(start, first)
    expected, found = "other dropout on rank 1 than on 0", "the same masks on both"
    yield from expect(different, "dropout-per-rank", expected, found)
    same, expected = torch.equal(start, _dropout_start(seed, "dropout/1")), f"of SEED={seed}"
    expected = f"dropout of rank 1 from its stream {expected}"
    yield from expect(same or not different, "dropout-stream", expected, _OTHER_STATE)
    state = rng.gather_rng_state(session.group, session.device)
    state["torch"] = torch.stack([first, start])
    rng.restore_rng_state(state, session.group, session.device)
    same, expected = torch.equal(torch.get_rng_state(), start), "rank 1 resumes its own dropout"
    yield from expect(same, "dropout-resume", expected, "another state of the generator")
    half = config.train.global_batch // 2
    expected = f"rank 1 of 2 reads the second half of the batch of SEED={seed}"
    offsets = _offsets(subject, seed, range(half, 2 * half))
    yield from _tokens(subject, session, offsets, expected)
