"""The step under check, its small forms, and state shared by its checks.

B batch, T tokens.
"""

import contextlib
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from gpt2 import loss
from gpt2.attention.rows import plan
from gpt2.check import distinct
from gpt2.check.cases import Case
from gpt2.check.fill import fill
from gpt2.check.shrink import CONTEXT, shrink
from gpt2.check.trial import Trial
from gpt2.check.workshop import Workshop
from gpt2.config import Config
from gpt2.model import GPT

# Chunk sizes of attention rows and of logits, so that a small model needs several chunks, as the
# large one does.
_ROWS = 16
_LOGITS = 4096


class Subject:
    """One step under check; properties are computed at their first use.

    ``others`` are all cases of the study by slug, including the parent.
    """

    def __init__(
        self, case: Case, workshop: Workshop, others: Mapping[str, Case] | None = None
    ) -> None:
        assert case.config is not None, "the case does not resolve"
        self.case = case
        self.workshop = workshop
        self.others = others or {}
        # Additional results, by the name of the check.
        self.facts: dict[str, Mapping[str, Any]] = {}

    @property
    def config(self) -> Config:
        """Return the configuration of the step."""
        assert self.case.config is not None
        return self.case.config

    @property
    def parent(self) -> Case | None:
        """Return the case that this step modifies, or None if there is none that resolves."""
        parent = self.others.get(self.case.parent)
        return parent if parent and parent.config else None

    @property
    def _study_configs(self) -> list[Config]:
        return [case.config for case in self.others.values() if case.config]

    @cached_property
    def shrunk(self) -> Config:
        """Return the small step, with its dropout and precision."""
        return shrink(self.config, self._study_configs)

    @cached_property
    def exact(self) -> Config:
        """Return the small step as a deterministic function: no dropout, fp32."""
        return shrink(self.config, self._study_configs, DROPOUT="0.0", PRECISION="fp32")

    @cached_property
    def model(self) -> GPT:
        """Return the exact step in float64, in eval mode, with every parameter filled."""
        return self.build(self.exact)

    @cached_property
    def trial(self) -> Trial:
        """Return a training run of the small step."""
        return Trial(self.shrunk, self.workshop)

    @cached_property
    def fingerprint(self) -> "distinct.Fingerprint":
        """Return the fingerprint that distinguishes this step from others."""
        return distinct.fingerprint(self)

    def beside(self, case: Case) -> "Subject":
        """Return the subject of another step of the same study."""
        return Subject(case, self.workshop, self.others)

    def build(self, config: Config) -> GPT:
        """Build a filled model in float64, in eval mode."""
        model = GPT(config.model)
        model.init_weights(config.seed)
        model.double().eval()
        fill(model)
        return model

    def tokens(self, batch: int = 2, length: int = CONTEXT, skip: int = 0) -> Tensor:
        """Return consecutive pieces of the excerpt as ids [B, T].

        T is at most the small context.
        """
        length = min(length, self.exact.model.shape.block_size)
        ids = torch.from_numpy(self.workshop.tokens.astype("int64"))[skip:]
        return ids[: batch * length].view(batch, length).clone()

    @contextlib.contextmanager
    def in_pieces(self) -> Iterator[None]:
        """Process attention and loss in chunks, as at the configured size."""
        shape = self.config.model.shape
        tokens = self.config.train.batch_size * shape.block_size
        with contextlib.ExitStack() as stack:
            if shape.block_size > plan.FEWEST_ROWS:
                stack.enter_context(mock.patch.object(plan, "FEWEST_ROWS", _ROWS))
                stack.enter_context(mock.patch.object(plan, "CPU_CHUNK_ELEMENTS", 0))
            if tokens * shape.vocab_size > loss.BLOCK_ELEMENTS:
                stack.enter_context(mock.patch.object(loss, "BLOCK_ELEMENTS", _LOGITS))
                stack.enter_context(mock.patch.object(loss, "CHUNK_BYTES", 4 * 8 * _LOGITS))
            yield
