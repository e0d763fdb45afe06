"""What a run leaves of a step whose numbers were not finite, so that it can be made again."""

from typing import Any

import safetensors.torch

from gpt2.training.session import Session
from lib.files import sha256, write_atomic, write_json
from lib.numerics.guard import NumericsError, table

SCHEMA_VERSION = 1


def write_failure(session: Session, error: NumericsError) -> list[str]:
    """Write numerics_failure.json, and the batch beside it; the lines to be shown and logged.

    Where the step was undone, a checkpoint of its start is there: going on makes it again.
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
        # Of an earlier failure, whose record is replaced here.
        run.numerics_batch.unlink(missing_ok=True)
    write_json(run.numerics_failure, record)
    rows = error.record["tensors"]
    by_rank = ("rank",) if any("rank" in row for row in rows) else ()
    lines = table(rows, by_rank) if rows else []
    again = "meets the step again" if error.undone else "goes on from the newest checkpoint"
    return [*lines, f"{run.numerics_failure}: {record['replay']} {again}"]


def set_apart(session: Session) -> None:
    """Move the record of a step that this start has got past: a finished run has no failure.

    It is kept, because the same step should have come out the same again.
    """
    run = session.run
    left = [path for path in (run.numerics_failure, run.numerics_batch) if path.exists()]
    if not left:
        return
    run.overcome.mkdir(exist_ok=True)
    for path in left:
        path.replace(run.overcome / path.name)
    text = "an earlier start ended in numbers that were not finite, and this one did not"
    session.records.line("WARN", f"{text}: {run.overcome}")
