"""The step under test: its small forms, its fingerprint, and runs that its checks share.

A filled model has deterministic parameter values by name, equal in every model that has the
parameter. B batch, T tokens.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from gpt2.attention.rows import MIN_CHUNK_ROWS, ScoreChunks
from gpt2.check.cases import CheckCase
from gpt2.check.context import CheckContext
from gpt2.check.distinct import Fingerprint, Projections
from gpt2.check.short_run import ShortRun, TracedRun
from gpt2.check.shrink import CONTEXT, NO_DROPOUT, small_config, with_changes
from gpt2.config import Config
from gpt2.loss import BLOCK_ELEMENTS, LogitsChunks
from gpt2.model import GPT, Execution
from lib.errors import ConfigError
from lib.files import canonical_json
from lib.runs.seeds import stream_seed

# Large enough to affect every product, small enough not to saturate a softmax.
_STD = 0.08
_VECTOR_NOISE = 0.2
# Chunk sizes of attention rows and of logits, so that a small model needs several chunks, as the
# large one does.
_ROWS = 16
_LOGITS = 4096


@torch.no_grad()
def fill_parameters(model: nn.Module) -> None:
    """Fill every parameter with nonzero values that depend only on its name and shape.

    Vectors keep the values from their constructor and get noise added, because the start may be a
    constant of the configuration.
    """
    for name, parameter in model.named_parameters():
        if ".codes." in name:
            # Codes and scales of a frozen matrix belong together.
            continue
        noise = _random_tensor(name, tuple(parameter.shape)).to(parameter.dtype)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=_VECTOR_NOISE)
        else:
            parameter.copy_(noise * _STD)


def _projections(tensors: Mapping[str, Tensor]) -> Projections:
    """Return each tensor's inner product with a random tensor and norm, by name and shape."""
    projections = {}
    for name, tensor in tensors.items():
        values = tensor.detach().double()
        direction = _random_tensor(f"projection/{name}", tuple(tensor.shape))
        key = f"{name} {tuple(tensor.shape)}"
        projections[key] = float((values * direction).sum()), float(values.norm())
    return projections


@lru_cache(maxsize=512)
def _random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal values in float64."""
    generator = torch.Generator().manual_seed(stream_seed(0, f"check/{name}/{shape}"))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def relative_error(actual: Tensor, expected: Tensor, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest expected value, or ``least`` if larger.

    It is the difference itself if both are 0.
    """
    difference = float((actual - expected).detach().abs().max())
    return difference / (max(float(expected.detach().abs().max()), least) or 1.0)


@dataclass(frozen=True)
class ObservedChunks(LogitsChunks):
    """Chunks of logits whose elements are recorded."""

    elements: list[int] = field(default_factory=list)

    def chunks(self, hidden_XC: Tensor, weight_VC: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the chunks."""
        for rows, logits_XV in super().chunks(hidden_XC, weight_VC):
            self.elements.append(logits_XV.numel())
            yield rows, logits_XV


class StepUnderTest:
    """One step under check; properties are computed at their first use.

    ``others`` are all cases of the study by slug, including the parent.
    """

    def __init__(
        self, case: CheckCase, context: CheckContext, others: Mapping[str, CheckCase] | None = None
    ) -> None:
        assert case.config is not None, "the case does not resolve"
        self.case, self.config, self.context = case, case.config, context
        others = others or {}
        parent = others.get(case.parent)
        # Configuration that this step modifies, or None if there is none that resolves.
        self.parent = parent.config if parent else None
        self._configs = {slug: other.config for slug, other in others.items() if other.config}
        # Additional results, by the name of the check.
        self.facts: dict[str, Mapping[str, Any]] = {}

    @cached_property
    def small(self) -> Config:
        """Return the small step, with its dropout and precision."""
        return small_config(self.config, self._configs.values())

    @cached_property
    def small_exact(self) -> Config:
        """Return the small step as a deterministic function: no dropout, fp32."""
        exact = {"PRECISION": "fp32", **NO_DROPOUT}
        return small_config(self.config, self._configs.values(), **exact)

    @cached_property
    def model(self) -> GPT:
        """Return the exact step in float64, in eval mode, with every parameter filled."""
        return self.build(self.small_exact)

    def full_model(self, config: Config) -> GPT:
        """Return the model of a configuration on the meta device, without values."""

        def build() -> GPT:
            with torch.device("meta"):
                return GPT(config.model)

        return self.context.once(config.model, build)

    @cached_property
    def traced_run(self) -> TracedRun:
        """Return a training run of the small step."""
        return TracedRun(self.small, self.context)

    @cached_property
    def fingerprint(self) -> Fingerprint:
        """Return logits and gradients of the filled model, and the result of training.

        Steps with equal models may differ in what optimizer or pruner do later: they train for the
        whole budget, and all others for one step.
        """
        config = self.small_exact
        run = ShortRun(config, self.context.prepare_data(config), self.context.new_run_dir())
        session, model = run.session, run.session.model.double().eval()
        fill_parameters(model)
        # The whole small context: a window may mask only its first tokens.
        idx_BT = self.tokens(2)
        logits = model(idx_BT[:, :-1])
        # Compute the loss as the trainer does.
        session.forward(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradient_projections = _projections(gradients)
        session.optimizer.zero_grad(set_to_none=True)
        peers = [config for slug, config in self._configs.items() if slug != self.case.slug]
        whole = any(peer.model == self.config.model for peer in peers)
        trained: dict[str, tuple[float, float]] = {}
        steps = session.budget.iterations if whole else 1
        for step in range(steps):
            piece_BT = self.tokens(1, skip=step * CONTEXT)
            run.step([(piece_BT[:, :-1], piece_BT[:, 1:])])
            if step in (0, steps - 1):
                weights = session.weights()
                with torch.no_grad():
                    weights["logits"] = model(idx_BT[:, :-1])
                values = _projections(weights).items()
                trained |= {f"step {step}: {name}": value for name, value in values}
        session.records.close()
        return Fingerprint(
            canonical_json(self.config.identity()),
            canonical_json(config.function()),
            _projections({"logits": logits}),
            gradient_projections,
            trained,
        )

    def build(self, config: Config) -> GPT:
        """Build a filled model in float64, in eval mode."""
        model = GPT(config.model)
        model.init_weights(config.seed)
        model.double().eval()
        fill_parameters(model)
        return model

    @cached_property
    def dropping(self) -> GPT | None:
        """Return the exact step with a dropout of one half; None if it does not support dropout."""
        # Flash attention does not support dropout on a CPU; the math kernel computes the same form.
        flash = self.small_exact.values["ATTENTION_BACKEND"] == "flash"
        kernel = {"ATTENTION_BACKEND": "math"} if flash else {}
        try:
            return self.build(with_changes(self.small_exact, DROPOUT="0.5", **kernel))
        except ConfigError:
            # NSA does not support dropout.
            return None

    def tokens(self, batch: int = 2, length: int = CONTEXT, skip: int = 0) -> Tensor:
        """Return consecutive pieces of the excerpt as ids [B, T], at most the small context."""
        length = min(length, self.small_exact.model.shape.block_size)
        ids = torch.from_numpy(self.context.tokens)[skip:]
        return ids[: batch * length].view(batch, length).clone()

    @contextlib.contextmanager
    def chunked(
        self, model: GPT | None = None, rows: int = _ROWS
    ) -> Iterator[ObservedChunks | None]:
        """Process attention and loss of a model in chunks, as at the configured size.

        The model is the exact step unless another is given. A chunk of attention has at most
        ``rows``. Yields the chunks of the loss, or None if the configured size needs none.
        """
        model = model or self.model
        shape, before = self.config.model.shape, model.execution
        tokens = self.config.train.batch_size * shape.block_size
        scores, logits = before.score_chunks, None
        if shape.block_size > MIN_CHUNK_ROWS:
            scores = ScoreChunks(cpu_elements=0, min_rows=rows)
        if tokens * shape.vocab_size > BLOCK_ELEMENTS:
            small = model.wte.num_embeddings * self.small_exact.model.shape.block_size
            elements = min(_LOGITS, small // 2)
            logits = ObservedChunks(chunk_bytes=2 * 8 * elements, block_elements=elements)
        model.set_execution(Execution(scores, logits or before.logits_chunks))
        try:
            yield logits
        finally:
            model.set_execution(before)
