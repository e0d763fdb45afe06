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
    write_json(run.numerics_failure, record)
    rows = error.record["tensors"]
    by_rank = ("rank",) if any("rank" in row for row in rows) else ()
    lines = table(rows, by_rank) if rows else []
    again = "meets the step again" if error.undone else "goes on from the newest checkpoint"
    return [*lines, f"{run.numerics_failure}: {record['replay']} {again}"]
