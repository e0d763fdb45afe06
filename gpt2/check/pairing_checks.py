"""Steps of a study are paired: they differ in their changes, and in no random number.

Every stream of random numbers is computed again from SEED and the purpose alone, as the manifest's
policy declares: 63 bits of SHA-256("SEED:PURPOSE").

B micro-batch, T tokens.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt2.check.finding import CheckFinding
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.model import GPT
from gpt2.training.records import RecordWriter
from gpt2.training.session import TrainingSession
from gpt2.training.setup import open_session
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


def check_paired(subject: StepUnderTest) -> list[CheckFinding]:
    """Check initial weights, dropout and data of the traced run against SEED and the other steps."""
    weights = _matrices(subject.traced_run.initial_weights)
    return [
        *_streams(subject.small, weights),
        *_other_stream(subject),
        *_dropout(subject),
        *_data_order(subject),
        *_second_rank(subject),
    ]


def stream_key(seed: int, purpose: str) -> int:
    """Return the seed of a stream of random numbers."""
    return int.from_bytes(hashlib.sha256(f"{seed}:{purpose}".encode()).digest()[:8], "big") >> 1


def _matrices(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the matrices with random initial values, without those that start at zero."""
    return {name: w for name, w in weights.items() if w.ndim >= 2 and bool(w.any())}


# Initial weights.


def _streams(config: Config, weights: Mapping[str, Tensor]) -> list[CheckFinding]:
    """Check that every matrix is drawn from its stream of SEED and INIT_STREAM."""
    wrong = [
        name
        for name, w in weights.items()
        if not torch.allclose(
            _unit(_beginning(w)), _unit(_drawn(config, name, w)), rtol=0, atol=_TOLERANCE
        )
    ]
    if not wrong:
        return []
    seed = f"SEED={config.seed}" + f", INIT_STREAM={config.init.init_stream}"
    expected = f"initial {first_of(wrong)} drawn from the stream of {seed} and the name alone"
    return [CheckFinding("initial-stream", expected, "values of another stream")]


def _other_stream(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that the A/A step of a baseline draws every matrix from another stream."""
    if subject.parent:
        return []
    config = with_changes(subject.small, INIT_STREAM=1)
    model = GPT(config.model)
    model.init_weights(config.seed, config.init.init_stream)
    named = {name: p.detach() for name, p in model.named_parameters()}
    return _streams(config, _matrices(named))


def _beginning(matrix: Tensor) -> Tensor:
    flat = matrix.flatten()
    return flat if len(flat) <= _WHOLE else flat[:_PREFIX]


def _drawn(config: Config, name: str, matrix: Tensor) -> Tensor:
    """Return the beginning of the matrix with a standard deviation of 1."""
    number = config.init.init_stream
    purpose = f"init-{number}/{name}" if number else f"init/{name}"
    generator = torch.Generator().manual_seed(stream_key(config.seed, purpose))
    return torch.empty_like(_beginning(matrix)).normal_(generator=generator)


def _unit(values: Tensor) -> Tensor:
    return values / values.norm()


# Dropout.


def _dropout(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that dropout starts at the beginning of its stream of SEED."""
    seed = subject.small.seed
    if torch.equal(subject.traced_run.dropout_start, _dropout_starts(seed)[0]):
        return []
    expected = f"dropout from the beginning of the stream of SEED={seed} alone, as in every step"
    return [CheckFinding("dropout-stream", expected, _OTHER_STATE)]


def _dropout_starts(seed: int) -> list[Tensor]:
    """Return the states of the generators of two ranks before the first step."""
    keys = (stream_key(seed, purpose) for purpose in ("dropout", "dropout/1"))
    return [torch.Generator().manual_seed(key).get_state() for key in keys]


# Data.


@dataclass(frozen=True)
class _Sequences:
    """Sequences of a run, computed from SEED and their number alone (Philox 4×64-10)."""

    key: int
    tokens: np.ndarray
    length: int

    @classmethod
    def of(cls, config: Config, tokens: np.ndarray) -> "_Sequences":
        key = stream_key(config.seed, "data")
        return cls(key, tokens, config.model.shape.block_size)

    def offset(self, number: int) -> int:
        """Return the offset of a sequence, uniform among all windows of T + 1 tokens."""
        bits = int(np.random.Philox(key=self.key, counter=number).random_raw())
        return bits * (len(self.tokens) - self.length) >> 64

    def rows(self, numbers: Sequence[int]) -> Tensor:
        """Return the tokens of sequences, [numbers, T + 1]."""
        offsets = [self.offset(number) for number in numbers]
        rows = [self.tokens[offset : offset + self.length + 1] for offset in offsets]
        return torch.from_numpy(np.stack(rows).astype("int64"))


def _data_order(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the offsets that the traced run consumed, and the tokens of its next step."""
    session, batch = subject.traced_run.run.session, subject.small.train.global_batch
    sequences = _Sequences.of(subject.small, subject.context.train_tokens)
    digest = hashlib.sha256()
    for step in range(session.state.iteration):
        numbers = range(step * batch, (step + 1) * batch)
        offsets = np.array([sequences.offset(number) for number in numbers], dtype="<i8")
        digest = hashlib.sha256(
            (digest.digest() if step else hashlib.sha256().digest()) + offsets.tobytes()
        )
    text = f"the sequences of SEED={subject.small.seed} in order, as in every step"
    if digest.hexdigest() != session.state.order.digest:
        steps = f"other offsets in {session.state.iteration} steps"
        return [CheckFinding("paired-data", text, steps)]
    first = session.state.iteration * batch
    return _tokens(session, sequences, range(first, first + batch), text)


def _tokens(
    session: TrainingSession, sequences: _Sequences, numbers: Sequence[int], expected: str
) -> list[CheckFinding]:
    """Check the tokens of the session's next step."""
    micro_batches, train = next(session.batches()), session.config.train
    sizes = [train.batch_size] * train.grad_accumulation
    if (found := [len(x_BT) for x_BT, _ in micro_batches]) != sizes:
        return [CheckFinding("micro-batches", f"micro-batches of {sizes} rows", f"{found}")]
    x_BT, y_BT = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    rows = sequences.rows(numbers)
    if torch.equal(x_BT, rows[:, :-1]) and torch.equal(y_BT, rows[:, 1:]):
        return []
    step = session.state.iteration + 1
    return [CheckFinding("paired-data", expected, f"other tokens in step {step}")]


# A second rank, which differs from the traced run in its settings too.


class _SecondOfTwo(ProcessGroup):
    """Rank 1 of two, without the other rank; rank 0 is assumed to send what rank 1 sends."""

    def gather(self, row: Tensor) -> Tensor:
        """Return two copies of ``row``."""
        return torch.stack([row, row])

    def share_gradients(self, module: torch.nn.Module, safe: bool = False) -> torch.nn.Module:
        """Return ``module``."""
        return module


def _second_rank(subject: StepUnderTest) -> list[CheckFinding]:
    """Check weights, dropout and data of a second rank with another SEED.

    The other settings that differ must not change any of them.
    """
    context, seed = subject.context, subject.small.seed + 1
    config = with_changes(subject.small, SEED=seed, **_OTHER_SETTINGS)
    records = RecordWriter(RunDir(context.new_run_dir()), lambda event: None)
    group = _SecondOfTwo(ProcessRank(1, 2))
    session = open_session(config, context.prepare_data(config), records, group=group)
    records.close()
    start, (first, second) = torch.get_rng_state(), _dropout_starts(seed)
    findings = _streams(config, _matrices(session.state.weights()))
    if torch.equal(start, first):
        text = "the same masks on both"
        findings.append(CheckFinding("dropout-per-rank", "other dropout on rank 1 than on 0", text))
    elif not torch.equal(start, second):
        expected = f"dropout of rank 1 from its stream of SEED={seed}"
        findings.append(CheckFinding("dropout-stream", expected, _OTHER_STATE))
    state = session.state.generators.state_dict()
    state["torch"] = torch.stack([first, start])
    session.state.generators.load_state_dict(state)
    if not torch.equal(torch.get_rng_state(), start):
        expected = "rank 1 resumes the dropout of rank 1"
        findings.append(CheckFinding("dropout-resume", expected, "another state of the generator"))
    half = config.train.global_batch // 2
    sequences = _Sequences.of(config, context.train_tokens)
    expected = f"rank 1 of 2 reads the second half of the batch of SEED={seed}"
    return findings + _tokens(session, sequences, range(half, 2 * half), expected)
