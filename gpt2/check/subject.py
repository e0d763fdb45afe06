"""What a check is given: one step, its small forms, and what its checks share.

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

# Rows of attention and logits of a loss that are walked at a time, so that a small model is walked
# in several pieces as the large one is.
_ROWS = 16
_LOGITS = 4096


class Subject:
    """One step under check; every property is made at its first use.

    ``others`` are all cases of the study by slug, the parent among them.
    """

    def __init__(
        self, case: Case, workshop: Workshop, others: Mapping[str, Case] | None = None
    ) -> None:
        assert case.config is not None, "a case that does not resolve has nothing to check"
        self.case = case
        self.workshop = workshop
        self.others = others or {}
        # What a check has to tell besides what is wrong, by the check's name.
        self.facts: dict[str, Mapping[str, Any]] = {}

    @property
    def config(self) -> Config:
        """The configured step."""
        assert self.case.config is not None
        return self.case.config

    @property
    def parent(self) -> Case | None:
        """The step that this one changes; None where there is none, or it does not resolve."""
        found = self.others.get(self.case.parent)
        return found if found and found.config else None

    @property
    def _among(self) -> list[Config]:
        return [case.config for case in self.others.values() if case.config]

    @cached_property
    def shrunk(self) -> Config:
        """The small step, with its dropout and precision."""
        return shrink(self.config, self._among)

    @cached_property
    def exact(self) -> Config:
        """The small step as a plain function: no dropout, nothing narrower than fp32."""
        return shrink(self.config, self._among, DROPOUT="0.0", PRECISION="fp32")

    @cached_property
    def model(self) -> GPT:
        """The exact step in float64, evaluating, every parameter filled by its name."""
        return self.build(self.exact)

    @cached_property
    def trial(self) -> Trial:
        """The small step, trained."""
        return Trial(self.shrunk, self.workshop)

    @cached_property
    def fingerprint(self) -> "distinct.Fingerprint":
        """What tells this step from others."""
        return distinct.fingerprint(self)

    def beside(self, case: Case) -> "Subject":
        """Another step of the same study."""
        return Subject(case, self.workshop, self.others)

    def build(self, config: Config) -> GPT:
        """A filled model in float64, evaluating."""
        model = GPT(config.model)
        model.init_weights(config.seed)
        model.double().eval()
        fill(model)
        return model

    def tokens(self, batch: int = 2, length: int = CONTEXT, skip: int = 0) -> Tensor:
        """Consecutive pieces of the excerpt as ids [B, T]; T at most the small context."""
        length = min(length, self.exact.model.shape.block_size)
        ids = torch.from_numpy(self.workshop.tokens.astype("int64"))[skip:]
        return ids[: batch * length].view(batch, length).clone()

    @contextlib.contextmanager
    def in_pieces(self) -> Iterator[None]:
        """Walk attention and loss in pieces, as the configured size does."""
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
