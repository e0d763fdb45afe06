"""Initial values of learnable vectors that a component declares."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from gpt2.attention.attention import MODULES
from gpt2.attention.options import ReciprocalOptions
from gpt2.attention.reciprocal import Reciprocal
from gpt2.check.model_checks import _vectors
from gpt2.model import GPT
from gpt2.shape import ModelShape
from tests.gpt2.builders import make_model_config


@dataclass(frozen=True)
class Sloped(ReciprocalOptions):
    """Reciprocal attention whose heads start at halves, quarters, eighths …"""

    built: float = 0.5

    def starts(self, shape: ModelShape) -> Mapping[str, float | Sequence[float]]:
        """Return the start of alpha."""
        return {"alpha": [0.5 ** (head + 1) for head in range(shape.n_head)]}


def build(shape: ModelShape, options: Sloped) -> Reciprocal:
    """Return the term, with starts from ``built``."""
    term = Reciprocal(shape, options)
    values = [options.built ** (head + 1) for head in range(shape.n_head)]
    assert term.alpha is not None
    term.alpha = torch.nn.Parameter(torch.tensor(values))
    return term


@pytest.mark.parametrize(("built", "findings"), [(0.5, []), (0.25, ["initial-value"])])
def test_a_vector_starts_as_its_component_declares(monkeypatch, built, findings):
    monkeypatch.setitem(MODULES, Sloped, build)
    config = make_model_config(n_layer=1, terms=("reciprocal",))
    term = Sloped(alpha=0.3, window=4, learnable=True, built=built)
    config = replace(config, attention=replace(config.attention, terms=(term,)))
    model = GPT(config)
    model.init_weights(1)
    found = list(_vectors(model, config))
    assert [finding.property for finding in found] == findings
    assert all("0.5, 0.25, 0.125" in finding.expected for finding in found)
