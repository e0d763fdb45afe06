"""Steps of a study are paired: they differ in their changes, and in no random number.

Every stream of random numbers is computed again from SEED and the purpose alone, as the manifest's
policy declares: 63 bits of SHA-256("SEED:PURPOSE").

B micro-batch, T tokens.
"""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpt2.check.cases import CheckCase, CheckFinding
from gpt2.check.context import InitialMatrix
from gpt2.check.shrink import with_changes
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import TrainSampler
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
# Unrelated prefixes have a correlation of 0.2 or less, with a standard deviation of 0.18.
_CORRELATED = 0.97
_TOLERANCE = 1e-5
_WORKERS = 2
_OTHER_STATE = "another state of the generator: another seed, or numbers drawn before step 1"
# Settings that no stream of random numbers depends on, besides two processes.
_OTHER_SETTINGS: Mapping[str, SymbolValue] = {
    "GPUS": 2,
    # The second rank does not exist.
    "DATA_PARALLEL": "ddp",
    # With one micro-batch per rank, the parts of ranks and micro-batches coincide.
    "GLOBAL_BATCH": 4,
    "BATCH_SIZE": 1,
    "GRAD_ACCUMULATION": 2,
    "EVAL_TOKENS": 128,
    "LOG_INTERVAL": 3,
    "GRAD_CLIP": "0.5",
}
_STEPS = 2


def check_paired(subject: StepUnderTest) -> list[CheckFinding]:
    """Check initial weights, dropout and data of the traced run against SEED and the other steps."""
    weights = _matrices(subject.traced_run.initial_weights)
    return [
        *_streams(subject.small, weights),
        *_other_stream(subject),
        *_independent(weights),
        *_same_start(subject),
        *_dropout(subject),
        *_data_order(subject),
        *_shared(subject),
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


def _independent(weights: Mapping[str, Tensor]) -> list[CheckFinding]:
    """Check that no two matrices begin with the same values, up to a factor."""
    names = [name for name, w in weights.items() if w.numel() > _WHOLE]
    unit_rows = torch.stack([_unit(_beginning(weights[name])) for name in names])
    equal = (unit_rows @ unit_rows.T).abs().triu(1) > _CORRELATED
    for i, j in equal.nonzero().tolist()[:1]:
        expected = f"independent initial values of {names[i]} and {names[j]}"
        text = "proportional values: both are drawn from one stream"
        return [CheckFinding("independent-matrices", expected, text)]
    return []


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


def _same_start(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that the matrices shared with parent and baseline start from the same bits."""
    digests = subject.context.initial_digests
    weights = subject.traced_run.initial_weights
    digests[subject.case.slug] = _digests(weights)
    for other in _compared(subject):
        if other.slug not in digests:
            digests[other.slug] = _built_digests(subject.for_case(other).small)
        mine, theirs = digests[subject.case.slug], digests[other.slug]
        common = [key for key in mine if key in theirs]
        if different := [
            name for name, shape in common if mine[name, shape] != theirs[name, shape]
        ]:
            expected = f"the initial bits of {first_of(different)} as in {other.slug}"
            text = f"other values of {len(different)} of {len(common)} common matrices"
            return [CheckFinding("paired-initial-weights", expected, text)]
    return []


def _compared(subject: StepUnderTest) -> list[CheckCase]:
    """Return parent and baseline, unless they have another seed or depth.

    The standard deviation of some matrices depends on the depth.
    """
    baseline = next((case for case in subject.study_cases.values() if not case.parent), None)
    cases = {case.slug: case for case in (subject.parent, baseline) if case and case.config}
    cases.pop(subject.case.slug, None)
    start = _start(subject.config)
    return [case for case in cases.values() if case.config and _start(case.config) == start]


def _start(config: Config) -> tuple[object, ...]:
    init = config.init
    return config.seed, config.model.shape.n_layer, init.init_from, init.init_stream


def _built_digests(config: Config) -> dict[InitialMatrix, str]:
    model = GPT(config.model)
    model.init_weights(config.seed, config.init.init_stream)
    return _digests({name: p.detach() for name, p in model.named_parameters()})


def _digests(weights: Mapping[str, Tensor]) -> dict[InitialMatrix, str]:
    return {
        (name, tuple(w.shape)): hashlib.sha256(w.contiguous().numpy().tobytes()).hexdigest()
        for name, w in _matrices(weights).items()
    }


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
    micro_batches = next(session.batches())
    rows = sequences.rows(numbers)
    pairs = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    if all(
        torch.equal(actual, part)
        for actual, part in zip(pairs, (rows[:, :-1], rows[:, 1:]), strict=True)
    ):
        return []
    return [CheckFinding("paired-data", expected, f"other tokens in step {_step(session)}")]


def _step(session: TrainingSession) -> int:
    return session.state.iteration + 1


# A second rank, and loader processes: the same code for every step, so checked once per process.


class _SecondOfTwo(ProcessGroup):
    """Rank 1 of two, without the other rank; rank 0 is assumed to send what rank 1 sends."""

    def gather(self, row: Tensor) -> Tensor:
        """Return two copies of ``row``."""
        return torch.stack([row, row])

    def share_gradients(self, module: torch.nn.Module, safe: bool = False) -> torch.nn.Module:
        """Return ``module``."""
        return module


def _shared(subject: StepUnderTest) -> list[CheckFinding]:
    """Return the findings about a second rank and loader processes, the same for every step."""
    data = subject.config.data
    key = f"paired/{subject.small.seed}/{data.loader_workers}"
    findings = subject.context.shared_findings
    if key not in findings:
        findings[key] = [
            *_second_rank(subject),
            *(_loader_processes(subject) if data.loader_workers else ()),
        ]
    return list(findings[key])


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


def _loader_processes(subject: StepUnderTest) -> list[CheckFinding]:
    """Check that loader processes yield the sequences of this process, in order."""
    config, session = subject.small, subject.traced_run.run.session
    data = with_changes(config, LOADER_WORKERS=_WORKERS, PREFETCH_FACTOR=2).data
    sampler = TrainSampler(session.dataset.train, config.model.shape.block_size, config.seed)
    batch = config.train.global_batch
    loader = BatchLoader(sampler, data, batch, 1, 0, 1, 0, False)
    steps = itertools.islice(iter(loader), _STEPS)
    read_BT = torch.cat([x_BT for step in steps for x_BT, _ in step])
    rows = _Sequences.of(config, subject.context.train_tokens).rows(range(_STEPS * batch))
    if torch.equal(read_BT, rows[:, :-1]):
        return []
    expected = f"the sequences in order from {_WORKERS} loader processes"
    return [CheckFinding("paired-data", expected, "other sequences or another order")]
