"""Trials in a process of their own: checks of a case, its runs, and the lines that they execute.

The process imports the product after the fault is planted. Values are plain JSON types.
"""

import hashlib
import itertools
import json
import math
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from gpt2 import train
from gpt2.check import CHECKS
from gpt2.check.context import CheckContext, ErrorCapture
from gpt2.check.shrink import small_config, with_changes
from gpt2.check.worker import iterate_results
from gpt2.config import Config
from gpt2.mutation.cases import TrialCase, check_case, config_digests
from gpt2.training.finish import write_results
from gpt2.training.records import RecordWriter, StopCondition
from gpt2.training.session import TrainingSession
from gpt2.training.setup import open_session, resume, warm_up
from lib.config.field import SymbolValue
from lib.env.process_group import ProcessGroup
from lib.env.ranks import ProcessRank
from lib.errors import ConfigError
from lib.project import ROOT
from lib.runs.run_dir import RunDir

# Digest of the results of a run, and the losses of its training steps and evaluations.
Observation = tuple[str, list[float]]
_FOLDERS = (f"{ROOT}/gpt2/", f"{ROOT}/lib/")
# CO_OPTIMIZED: the code of a function, not of a module or class.
_IS_FUNCTION = 1
_INTERRUPTED_AT = 3
_STEPS_OF_RANK = 2
# The small form of the checks, and one of other sizes with evaluations, a sample and documents.
_SHAPES: Sequence[Sequence[dict[str, SymbolValue]]] = (
    (),
    (
        {"SEED": 11, "EVAL_TOKENS": 150, "EVAL_INTERVAL": 4, "SAMPLE_TOKENS": 6},
        {
            "CUSTOM_FORMAT": "jsonl",
            "CUSTOM_PATH": "documents.jsonl",
            "CUSTOM_TEXT_FIELD": "text",
            "VAL_FRACTION": "0.3",
        },
        {"GLOBAL_BATCH": 6, "BATCH_SIZE": 3, "GRAD_ACCUMULATION": 2},
        {"MAX_ITERS": 8},
        {"N_LAYER": 2},
        {"BLOCK_SIZE": 32},
    ),
)


def run_checks(cases: Sequence[TrialCase], order: Sequence[str]) -> dict[str, Any]:
    """Run the checks of each case in ``order`` until one fails.

    Returns check, property, case and text of the first finding, and the seconds of every check.
    """
    seconds: dict[str, float] = {}
    checks = [CHECKS[name] for name in order]
    for case in cases:
        chosen, others = check_case(case)
        for name, result in iterate_results(chosen, checks, others, Path()):
            seconds[name] = result.seconds
            if result.state == "failed":
                finding = result.findings[0]
                text = f"expected {finding.expected}; found: {finding.found}"
                caught = {"check": name, "property": finding.property, "text": text}
                return {"caught": caught | {"case": case.name}, "seconds": seconds}
    return {"caught": None, "seconds": seconds}


def resolved_digests() -> dict[str, str]:
    """Return a digest of the configuration of every case of the defconfigs."""
    return config_digests()


def observe(cases: Sequence[TrialCase]) -> dict[str, list[Observation]]:
    """Train, evaluate and resume each case in each shape. Return the observations.

    Every run must succeed: the runs with a fault are compared with these.
    """
    observed = {case.name: [_observation(case, i) for i in range(len(_SHAPES))] for case in cases}
    failed = [name for name, each in observed.items() if not all(digest for digest, _ in each)]
    assert not failed, f"runs without a fault fail: {failed}"
    return observed


def changed_cases(
    cases: Sequence[TrialCase],
    before: Mapping[str, Sequence[Observation]],
    most: int,
    in_all_shapes: int,
) -> dict[str, float]:
    """Return cases whose results differ from the observations ``before``, at most ``most``.

    The value is the largest relative difference of a loss, infinite for a run that fails. Only the
    first ``in_all_shapes`` cases are run in all shapes, if the first shape changes nothing.
    """
    changed: dict[str, float] = {}
    for shape in range(len(_SHAPES)):
        for case in cases[:in_all_shapes] if shape else cases:
            if case.name in changed or len(changed) == most:
                continue
            now, then = _observation(case, shape), before[case.name][shape]
            if now[0] != then[0]:
                changed[case.name] = _largest_difference(now[1], then[1])
    return changed


def exact_losses(cases: Sequence[TrialCase]) -> dict[str, list[list[float]]]:
    """Return the losses of training and evaluation in float64 of each case, in each shape."""
    default = torch.get_default_dtype()
    # The trainer adds up losses in the default type.
    torch.set_default_dtype(torch.float64)
    try:
        return {case.name: [_exact_losses(case, i) for i in range(len(_SHAPES))] for case in cases}
    finally:
        torch.set_default_dtype(default)


def _exact_losses(case: TrialCase, shape: int) -> list[float]:
    """Return the losses of a run in float64; none if it fails."""
    with CheckContext() as context, ErrorCapture():
        config = with_changes(_config_in_shape(case, shape, context), PRECISION="fp32")
        folder = context.new_run_dir()
        session = _open(config, context.prepare_data(config), folder)
        session.state.model.double()
        train.train(session, StopCondition(lambda: False, 0))
        evaluation = session.evaluate(session.state.model)
        assert evaluation is not None
        session.records.close()
        return [*_recorded_losses(folder), evaluation.loss]
    return []


def _largest_difference(now: Sequence[float], then: Sequence[float]) -> float:
    if len(now) != len(then):
        return math.inf
    return max((abs(x / y - 1) for x, y in zip(now, then, strict=True)), default=0.0)


def _observation(case: TrialCase, shape: int) -> Observation:
    """Return the digest of the results and the losses; an error of the run is a result."""
    with CheckContext() as context, ErrorCapture():
        return _results(_config_in_shape(case, shape, context), context)
    return "", []


def _config_in_shape(case: TrialCase, shape: int, context: CheckContext) -> Config:
    chosen, others = check_case(case)
    assert chosen.config is not None, case.name
    among = [other.config for other in others.values() if other.config]
    _write_documents(context)
    return _reshaped(small_config(chosen.config, among), _SHAPES[shape])


def _recorded_losses(folder: Path) -> list[float]:
    rows = map(json.loads, RunDir(folder).metrics.read_text(encoding="utf-8").splitlines())
    return [row["loss"] for row in rows if "loss" in row]


def covered_lines(case: TrialCase) -> dict[str, list[int]]:
    """Observe a case. Return the lines of functions that it executes, by path."""
    # Lines of each function that have not been executed yet, and those that have.
    left: dict[CodeType, set[int]] = {}
    executed: dict[CodeType, set[int]] = {}

    def local(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            left[frame.f_code].discard(frame.f_lineno)
            executed[frame.f_code].add(frame.f_lineno)
        return local

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in left:
            inside = code.co_filename.startswith(_FOLDERS) and code.co_flags & _IS_FUNCTION
            left[code] = {line for *_, line in code.co_lines() if line} if inside else set()
            left[code].discard(code.co_firstlineno)
            executed[code] = set()
        # Without a trace function, the call costs no more than without tracing.
        return local if left[code] else None

    threading.settrace(trace)
    sys.settrace(trace)
    try:
        observe([case])
    finally:
        sys.settrace(None)
        threading.settrace(lambda frame, event, argument: None)
    lines: dict[str, set[int]] = {}
    for code, numbers in executed.items():
        if numbers:
            path = str(Path(code.co_filename).relative_to(ROOT))
            lines.setdefault(path, set()).update(numbers)
    return {path: sorted(numbers) for path, numbers in lines.items()}


def _reshaped(config: Config, groups: Sequence[dict[str, SymbolValue]]) -> Config:
    """Return the configuration with every group of changes that violates no rule."""
    for changes in groups:
        try:
            config = with_changes(config, **changes)
        except ConfigError:
            continue
    return config


def _write_documents(context: CheckContext) -> None:
    """Write the excerpt as documents of several lengths."""
    text = bytes(context.tokens[context.tokens < 128].astype("u1")).decode("ascii")
    ends = [0, *(150 * i + 40 * (i % 3) for i in range(1, 24))]
    lines = [json.dumps({"text": text[a:b]}) for a, b in itertools.pairwise(ends)]
    (context.folder / "documents.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def _results(config: Config, context: CheckContext) -> Observation:
    """Return digest and losses of a whole run, an interrupted one, and a second rank's data."""
    folder, whole = context.prepare_data(config), context.new_run_dir()
    sha256 = hashlib.sha256()
    for part in _whole_run(config, folder, whole):
        sha256.update(part)
    for part in _interrupted_run(config, folder, context.new_run_dir()):
        sha256.update(part)
    return sha256.hexdigest(), _recorded_losses(whole)


def _whole_run(config: Config, build_dir: Path, folder: Path) -> Iterator[bytes]:
    session = _open(config, build_dir, folder)
    _train_to_end(session)
    evaluation = session.evaluate(session.state.model)
    assert evaluation is not None
    write_results(session, evaluation, time.monotonic())
    yield from _files(session)
    if config.train.global_batch % (2 * config.train.batch_size) == 0:
        session.group = ProcessGroup(ProcessRank(1, 2))
        batches = session.batches()
        for _ in range(_STEPS_OF_RANK):
            for x_BT, y_BT in next(batches):
                yield torch.cat([x_BT, y_BT]).numpy().tobytes()
    session.records.close()


def _interrupted_run(config: Config, build_dir: Path, folder: Path) -> Iterator[bytes]:
    """Train with an interruption, and yield the results of the resumed run."""
    session = _open(config, build_dir, folder)
    session.run.checkpoints.mkdir(exist_ok=True)
    train.train(session, StopCondition(lambda: session.state.iteration >= _INTERRUPTED_AT, 0))
    train.save_checkpoint(session)
    session.records.close()
    session = _open(config, build_dir, folder)
    resume(session)
    yield str(session.state.iteration).encode()
    _train_to_end(session)
    yield from _files(session)
    session.records.close()


def _train_to_end(session: TrainingSession) -> None:
    """Train, and save the last checkpoint, which the trainer does before it writes results."""
    session.run.checkpoints.mkdir(exist_ok=True)
    train.train(session, StopCondition(lambda: False, 0))
    train.save_checkpoint(session)


def _open(config: Config, build_dir: Path, folder: Path) -> TrainingSession:
    session = open_session(config, build_dir, RecordWriter(RunDir(folder), lambda event: None))
    warm_up(session)
    return session


def _files(session: TrainingSession) -> Iterator[bytes]:
    """Yield the deterministic results of a run: weights, metrics, rows, sample and summary."""
    run, state = session.run, session.state
    for name, weight in state.weights().items():
        yield name.encode() + weight.contiguous().numpy().tobytes()
    for path in (run.weights, run.metrics, run.per_query, run.sample):
        yield path.read_bytes() if path.exists() else b"absent"
    if run.summary.exists():
        summary = json.loads(run.summary.read_text(encoding="utf-8"))
        yield json.dumps({k: v for k, v in summary.items() if k != "timing"}).encode()
    yield repr((state.iteration, state.tokens, state.order.digest, state.progress)).encode()
