"""Planned runs with fabricated results."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from lib.runs.run import Run, RunVariant, run_name
from tests.lib.fabricated import MANIFEST, WARMUP, changed, digest_of, write_run


@dataclass(frozen=True)
class Named:
    """A configuration that consists of its name."""

    hash8: str

    @property
    def digest(self) -> str:
        return digest_of(self.identity())

    def identity(self) -> dict[str, Any]:
        return {"name": self.hash8, **WARMUP}


@pytest.fixture
def make_run(tmp_path) -> Callable[..., Run[Named]]:
    """Return a factory of planned runs; with a loss, the run's finished directory is written too.

    ``figures`` are nats, correct tokens and tokens of single documents; the first of ``losses`` is
    that of the untrained model.
    """

    def make(
        slug: str,
        loss: float | None = None,
        *,
        seed: int = 1,
        study: str = "demo",
        data: str = "d1",
        documents: tuple[str, ...] = ("x", "y"),
        figures: Mapping[str, tuple[float, int, int]] = {},
        manifest: Mapping[str, Any] = {},
        losses: tuple[float, ...] = (20.0, 3.2),
        number: int = 0,
        parent: str = "",
        levels: dict[str, str] | None = None,
        text: str = "",
        **final: Any,
    ) -> Run[Named]:
        config = Named(f"{slug}{seed}")
        path = tmp_path / study / run_name(slug, seed, config)
        variant = RunVariant(slug, number=number, parent=parent, levels=levels, text=text)
        if loss is not None:
            write_run(
                path,
                identity=config.identity(),
                manifest=changed(MANIFEST, data__digest=data, **manifest),
                documents=dict.fromkeys(documents, (31.4, 5, 10)) | dict(figures),
                losses=losses,
                final={"val_loss": loss, **final},
            )
        return Run("demo", variant, seed, config, path)

    return make


@pytest.fixture
def make_study(make_run) -> Callable[..., list[Run[Named]]]:
    """Return a factory of the runs of steps, each with its losses by seed, the baseline first."""

    def make(
        steps: Mapping[str, Sequence[float]],
        parents: Mapping[str, str] | None = None,
        **every: Any,
    ) -> list[Run[Named]]:
        baseline = next(iter(steps))
        of = dict.fromkeys(steps, baseline) | {baseline: ""} | dict(parents or {})
        return [
            make_run(slug, loss, seed=seed, number=number, parent=of[slug], **every)
            for number, (slug, losses) in enumerate(steps.items())
            for seed, loss in enumerate(losses, 1)
        ]

    return make
