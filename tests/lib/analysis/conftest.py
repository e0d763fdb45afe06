"""Run directories as the trainer leaves them, without training."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lib.files import write_json
from lib.plan import Run, Variant
from lib.repro.seal import SCHEMA_VERSION, with_artifacts, write_manifest
from lib.rundir import RunDir
from lib.status import State, Status, write_status


@dataclass(frozen=True)
class Named:
    """A configuration that is its name."""

    hash8: str

    def identity(self) -> dict[str, Any]:
        return {"name": self.hash8}


def seal(run: RunDir, record: dict[str, Any]) -> None:
    """Write a manifest that agrees with what lies beside it."""
    whole = {
        "schema_version": SCHEMA_VERSION,
        "status": State.SUCCESS,
        "code": {},
        "environment": {},
        "volatile": {},
        **record,
    }
    write_manifest(run, with_artifacts(run, whole))


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., Run[Named]]:
    """A planned run, with the results of a finished one where a loss is given."""

    def make(
        slug: str,
        loss: float | None = None,
        *,
        seed: int = 1,
        parent: str = "",
        number: int = 0,
        data: str = "d1",
        documents: tuple[str, ...] = ("x", "y"),
        study: str = "demo",
        levels: dict[str, str] | None = None,
        **final: Any,
    ) -> Run[Named]:
        config = Named(f"{slug}{seed}")
        path = tmp_path / study / f"{slug}-s{seed}"
        run = Run(
            "demo", Variant(slug, number=number, parent=parent, levels=levels), seed, config, path
        )
        if loss is None:
            return run
        path.mkdir(parents=True)
        directory = RunDir(path)
        write_json(directory.resolved_config, {"identity": config.identity()})
        figures = {
            "val_loss": loss,
            "unigram_entropy": 3.145,
            "parameters": 1000,
            "tokens": 2048,
            "iterations": 2,
            "sparsity": 0.0,
        }
        timing = {"train_seconds": 61.0, "tokens_per_second": 33.6}
        write_json(directory.summary, {"final": {**figures, **final}, "timing": timing})
        rows = "".join(f"{name},10,5,31.4\n" for name in documents)
        directory.per_query.write_text("item_id,n_tokens,n_correct,nll_sum\n" + rows)
        for file in (directory.metrics, directory.timing, directory.logs, directory.weights):
            file.write_text("{}\n")
        seal(directory, {"data": {"digest": data}})
        write_status(directory, Status(State.SUCCESS))
        return run

    return make
