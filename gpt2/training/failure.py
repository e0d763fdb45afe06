"""Records of a step with non-finite values, from which the step can be replayed."""

from typing import Any

import safetensors.torch

from gpt2.training.session import Session
from lib.files import sha256, write_atomic, write_json
from lib.numerics.guard import NumericsError, table

SCHEMA_VERSION = 1


def write_failure(session: Session, error: NumericsError) -> list[str]:
    """Write numerics_failure.json and the offending batch. Return the log lines.

    If the step was rolled back, a checkpoint of its start exists and resuming repeats the step.
    """
    run = session.run
    record: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        **error.record,
        "checkpoint": session.saved_at if error.undone else None,
        "batch": None,
        "replay": f"make RUNS={session.label}",
    }
    if error.tensors:
        contiguous = {name: t.contiguous() for name, t in error.tensors.items()}
        write_atomic(run.numerics_batch, safetensors.torch.save(contiguous))
        record["batch"] = {"file": run.numerics_batch.name, "sha256": sha256(run.numerics_batch)}
    else:
        # Leftover of an earlier failure.
        run.numerics_batch.unlink(missing_ok=True)
    write_json(run.numerics_failure, record)
    rows = error.record["tensors"]
    by_rank = ("rank",) if any("rank" in row for row in rows) else ()
    lines = table(rows, by_rank) if rows else []
    effect = "repeats the step" if error.undone else "resumes from the newest checkpoint"
    return [*lines, f"{run.numerics_failure}: {record['replay']} {effect}"]


def set_apart(session: Session) -> None:
    """Archive the failure record of an earlier start after this start has succeeded.

    The record is kept, because a deterministic step should have failed again.
    """
    run = session.run
    paths = [path for path in (run.numerics_failure, run.numerics_batch) if path.exists()]
    if not paths:
        return
    run.overcome.mkdir(exist_ok=True)
    for path in paths:
        path.replace(run.overcome / path.name)
    text = "an earlier start failed with non-finite values, but this start did not"
    session.records.line("WARN", f"{text}: {run.overcome}")
