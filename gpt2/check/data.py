"""Prepared data: intact, made by the configured tokenizer, and read as batches of the right shape.

B micro-batch, T tokens.
"""

from pathlib import Path

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.data import source
from gpt2.data.loader import BatchLoader
from gpt2.data.sampler import TrainSampler
from gpt2.data.store import MANIFEST, open_dataset
from lib.errors import DataError, Problem

_STEPS = 2


def check(subject: Subject) -> list[Finding]:
    """Check the data set and its first batches.

    Absent data is reported with the command that prepares it and is not a failure; damaged data is.
    """
    config, build_dir = subject.config, subject.workshop.build_dir
    try:
        folder = source.dataset_folder(config.data, build_dir)
    except DataError as error:
        return [_absent(problem) for problem in error.problems[:1]]
    if not (folder / MANIFEST).exists():
        return _refused(subject, folder)
    try:
        dataset = open_dataset(config.data, build_dir, config.model.shape.vocab_size)
        sampler = TrainSampler(dataset.train, config.model.shape.block_size, config.seed)
    except DataError as error:
        return [
            Finding("intact-data", "an intact data set", str(problem)) for problem in error.problems
        ]
    return _batches(subject, sampler)


def _refused(subject: Subject, folder: Path) -> list[Finding]:
    """Check that no other data is used in place of a missing data set."""
    config = subject.config.data
    description = f"{config.dataset} with the {config.tokenizer} tokenizer"
    try:
        open_dataset(config, subject.workshop.build_dir, subject.config.model.shape.vocab_size)
    except DataError:
        what, command = f"no prepared {description}", "type: make data"
        return [_absent(Problem(what, str(folder), command, code="data.missing"))]
    expected = f"no training without a prepared {description}"
    return [Finding("no-substitute-data", expected, "another data set is opened")]


def _batches(subject: Subject, sampler: TrainSampler) -> list[Finding]:
    train, shape = subject.config.train, subject.config.model.shape
    loader = BatchLoader(
        sampler, subject.exact.data, train.global_batch, train.batch_size, 0, train.gpus, 0, False
    )
    shape_BT = (train.batch_size, shape.block_size)
    for _, micro_batches in zip(range(_STEPS), loader):
        for x_BT, y_BT in micro_batches:
            if tuple(x_BT.shape) != shape_BT or tuple(y_BT.shape) != shape_BT:
                return [Finding("batch-shape", f"batches of {shape_BT}", f"{tuple(x_BT.shape)}")]
            largest = int(max(x_BT.max(), y_BT.max()))
            if largest >= shape.vocab_size:
                expected = f"tokens below {shape.vocab_size}"
                return [Finding("token-range", expected, f"token {largest}")]
            if not bool((x_BT[:, 1:] == y_BT[:, :-1]).all()):
                return [Finding("shifted-targets", "targets shifted by one token", "other targets")]
    return []


def _absent(problem: Problem) -> Finding:
    location = f" ({problem.where})" if problem.where else ""
    text = f"{problem.what}{location}" + (f"; {problem.next}" if problem.next else "")
    return Finding("prepared-data", "a prepared data set", text, absent=True)
