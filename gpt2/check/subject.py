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
from gpt2.check.distinct import Fingerprint
from gpt2.check.short_run import ShortRun, TracedRun
from gpt2.check.shrink import CONTEXT, small_config, with_changes
from gpt2.config import Config
from gpt2.loss import BLOCK_ELEMENTS, LogitsChunks
from gpt2.model import GPT, Execution
from lib.errors import ConfigError
from lib.files import canonical_json
from lib.runs.seeds import stream_seed

# Large enough to affect every product, small enough not to saturate a softmax.
_STD = 0.08
_VECTOR_NOISE = 0.2


@torch.no_grad()
def fill_parameters(model: nn.Module) -> None:
    """Fill every parameter with nonzero values that depend only on its name and shape.

    Vectors keep the values from their constructor and get noise added, because the start may be a
    constant of the configuration.
    """
    for name, parameter in model.named_parameters():
        noise = _random_tensor(name, tuple(parameter.shape)).to(parameter.dtype)
        if parameter.ndim < 2:
            parameter.add_(noise, alpha=_VECTOR_NOISE)
        else:
            parameter.copy_(noise * _STD)


def _random_projection(name: str, tensor: Tensor) -> tuple[float, float]:
    """Return a tensor's fingerprint: inner product with a random tensor, and norm.

    The random tensor depends only on ``name`` and the shape.
    """
    direction = _random_tensor(f"projection/{name}", tuple(tensor.shape))
    tensor = tensor.detach().double()
    return float((tensor * direction).sum()), float(tensor.norm())


def _projections(tensors: Mapping[str, Tensor]) -> dict[str, tuple[float, float]]:
    """Return the projection of each tensor."""
    return {name: _random_projection(name, tensor) for name, tensor in tensors.items()}


def _by_shape(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors by name and shape."""
    return {name_and_shape(name, tensor): tensor for name, tensor in tensors.items()}


def name_and_shape(name: str, tensor: Tensor) -> str:
    """Return the key of a tensor in a fingerprint."""
    return f"{name} {tuple(tensor.shape)}"


@lru_cache(maxsize=512)
def _random_tensor(name: str, shape: tuple[int, ...]) -> Tensor:
    """Return standard normal values in float64."""
    generator = torch.Generator().manual_seed(stream_seed(0, f"check/{name}/{shape}"))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected value unless that is 0."""
    difference, size = (actual - expected).detach().abs().max(), expected.detach().abs().max()
    return float(difference / size) if size else float(difference)


@dataclass(frozen=True)
class ObservedChunks(LogitsChunks):
    """Chunks of logits whose elements are recorded."""

    elements: list[int] = field(default_factory=list)

    def chunks(self, hidden_XC: Tensor, weight_VC: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield the chunks."""
        for rows, logits_XV in super().chunks(hidden_XC, weight_VC):
            self.elements.append(logits_XV.numel())
            yield rows, logits_XV


# Chunk sizes of attention rows and of logits, so that a small model needs several chunks, as the
# large one does.
_ROWS = 16
_LOGITS = 4096


class StepUnderTest:
    """One step under check; properties are computed at their first use.

    ``others`` are all cases of the study by slug, including the parent.
    """

    def __init__(
        self, case: CheckCase, context: CheckContext, others: Mapping[str, CheckCase] | None = None
    ) -> None:
        assert case.config is not None, "the case does not resolve"
        self.case = case
        self.context = context
        self.study_cases = others or {}
        # Additional results, by the name of the check.
        self.facts: dict[str, Mapping[str, Any]] = {}

    @property
    def config(self) -> Config:
        """Return the configuration of the step."""
        assert self.case.config is not None
        return self.case.config

    @property
    def parent(self) -> CheckCase | None:
        """Return the case that this step modifies, or None if there is none that resolves."""
        parent = self.study_cases.get(self.case.parent)
        return parent if parent and parent.config else None

    @property
    def _study_configs(self) -> list[Config]:
        return [case.config for case in self.study_cases.values() if case.config]

    @cached_property
    def small(self) -> Config:
        """Return the small step, with its dropout and precision."""
        return small_config(self.config, self._study_configs)

    @cached_property
    def small_exact(self) -> Config:
        """Return the small step as a deterministic function: no dropout, fp32."""
        return small_config(self.config, self._study_configs, DROPOUT="0.0", PRECISION="fp32")

    @cached_property
    def model(self) -> GPT:
        """Return the exact step in float64, in eval mode, with every parameter filled."""
        return self.build(self.small_exact)

    @property
    def full_model(self) -> GPT:
        """Return the model at its configured size on the meta device, without values."""
        config = self.config.model

        def build() -> GPT:
            with torch.device("meta"):
                return GPT(config)

        return self.context.once(config, build)

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
        peers = [case.config for case in self.study_cases.values() if case.slug != self.case.slug]
        whole = any(peer and peer.model == self.config.model for peer in peers)
        run = ShortRun(config, self.context.prepare_data(config), self.context.new_run_dir())
        session = run.session
        model = session.model.double().eval()
        fill_parameters(model)
        # The whole small context: a window may mask only its first tokens.
        idx_BT = self.tokens(2)
        logits = model(idx_BT[:, :-1])
        # Compute the loss as the trainer does.
        session.forward(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        gradient_projections = _projections(_by_shape(gradients))
        session.optimizer.zero_grad(set_to_none=True)
        trained: dict[str, tuple[float, float]] = {}
        steps = session.budget.iterations if whole else 1
        for step in range(steps):
            piece_BT = self.tokens(1, skip=step * CONTEXT)
            run.step([(piece_BT[:, :-1], piece_BT[:, 1:])])
            if step in (0, steps - 1):
                weights = _by_shape(session.weights())
                with torch.no_grad():
                    weights["logits"] = model(idx_BT[:, :-1])
                values = _projections(weights).items()
                trained |= {f"step {step}: {name}": value for name, value in values}
        run.close()
        return Fingerprint(
            canonical_json(self.config.identity()),
            canonical_json(config.function()),
            _projections({"logits": logits}),
            gradient_projections,
            trained,
        )

    def for_case(self, case: CheckCase) -> "StepUnderTest":
        """Return another step of the same study."""
        return StepUnderTest(case, self.context, self.study_cases)

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
        """Return consecutive pieces of the excerpt as ids [B, T].

        T is at most the small context.
        """
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
