"""Planned runs with fabricated results."""

import builtins
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
    """Return a factory of planned runs; with a loss, the run's finished directory is written too."""

    def make(
        slug: str,
        loss: float | None = None,
        *,
        seed: int = 1,
        parent: str = "",
        number: int = 0,
        data: str = "d1",
        documents: tuple[str, ...] = ("x", "y"),
        # Nats, correct tokens and tokens of single documents.
        figures: dict[str, tuple[float, int, int]] | None = None,
        study: str = "demo",
        levels: dict[str, str] | None = None,
        text: str = "",
        manifest: dict[str, Any] | None = None,
        # The first is the loss of the untrained model.
        losses: tuple[float, ...] = (20.0, 3.2),
        **final: Any,
    ) -> Run[Named]:
        config = Named(f"{slug}{seed}")
        path = tmp_path / study / run_name(slug, seed, config)
        run = Run(
            "demo",
            RunVariant(slug, number=number, parent=parent, levels=levels, text=text),
            seed,
            config,
            path,
        )
        if loss is None:
            return run
        write_run(
            path,
            identity=config.identity(),
            manifest=changed(MANIFEST, data__digest=data, **(manifest or {})),
            documents=dict.fromkeys(documents, (31.4, 5, 10)) | (figures or {}),
            losses=losses,
            final={"val_loss": loss, **final},
        )
        return run

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


@pytest.fixture
def without_matplotlib(monkeypatch) -> None:
    """Let every import of matplotlib fail, as if the package were missing."""
    original = builtins.__import__

    def without(name, *rest, **more):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return original(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without)
