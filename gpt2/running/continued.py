"""Half-trained runs that planned runs go on with in another number of processes: ``CONTINUE=y``.

The result depends on both numbers, so it is a run of its own: it begins as a copy, and records when
the number changed.
"""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from gpt2.config import DIVISION, Config
from gpt2.records.files import write_resolved_config
from lib.console import log
from lib.errors import EXIT_INTERRUPTED, ConfigError, Problem
from lib.files import link_error
from lib.runs.identity import flatten_identity
from lib.runs.lease import require_free
from lib.runs.record import RunRecord
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, State, read_status, write_status


def continue_half_trained(runs: Sequence[Run[Config]], folder: Path) -> None:
    """Give each new run of ``runs`` the checkpoint of its half-trained run in ``folder``.

    The runs may differ in the division of a batch alone. Raises ConfigError if there is no such run
    and none that is continued already, or if one is being trained.
    """
    new = [run for run in runs if not run.path.exists()]
    sources = {run.name: max(_half_trained(run, folder), default=None) for run in new}
    if new == list(runs) and not any(sources.values()):
        what = (
            "no half-trained run that differs from a planned one in the number of processes alone"
        )
        advice = "type: make ls, to list the runs"
        raise ConfigError(Problem(what, str(folder), advice, code="run.none-to-continue"))
    for run in new:
        if source := sources[run.name]:
            iteration, path = source
            _copy(RunDir(path), run)
            log("RESUME", f"{run.label}   goes on from iteration {iteration:,} of {path.name}")


def _half_trained(run: Run[Config], folder: Path) -> Iterator[tuple[int, Path]]:
    """Yield the last saved iteration and directory of each run that ``run`` can go on from."""
    wanted = flatten_identity(run.config.identity())
    for path in folder.glob(f"{run.variant.slug}-s{run.seed}-*"):
        record, steps = RunRecord(RunDir(path)), RunDir(path).checkpoint_steps
        if not steps or record.is_done or record.damage or RunDir(path).is_replaced:
            continue
        recorded = flatten_identity(record.identity)
        if all(wanted.get(n) == recorded.get(n) for n in {*wanted, *recorded} - DIVISION):
            require_free(RunDir(path))
            yield steps[-1], path


def _copy(source: RunDir, run: Run[Config]) -> None:
    """Copy all that a resumed run reads to the directory of ``run``, which then exists."""
    status = read_status(source)
    assert status is not None
    files = source.metrics, source.timing, source.telemetry, source.logs, source.manifest
    for path in (source.checkpoints, *source.checkpoints.rglob("*"), *files):
        if path.is_symlink():
            raise link_error(path)
    with tempfile.TemporaryDirectory(dir=source.path.parent, prefix=".continued-") as name:
        copy = RunDir(Path(name) / run.name)
        copy.path.mkdir()
        shutil.copytree(source.checkpoints, copy.checkpoints)
        for file in files:
            if file.exists():
                shutil.copy2(file, copy.path)
        write_resolved_config(copy, run.config)
        message = f"saved by {source.path.name}"
        write_status(
            copy,
            replace(status, state=State.INTERRUPTED, exit_code=EXIT_INTERRUPTED, message=message),
        )
        copy.path.rename(run.path)
