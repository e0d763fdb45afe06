"""Sizes that do not go together, and what it does not go with."""

import pytest
import torch

from gpt2.ablation.resolve import resolve_config
from gpt2.model import GPT
from lib.errors import ConfigError
from lib.kconfig import Layer, Tree
from tests.gpt2.attention.nsa.sizes import PAPER, options
from tests.gpt2.builders import make_model_config


class TestConfiguration:
    """Sizes that do not go together, and what it does not go with."""

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"compress": 5}, "NSA_COMPRESS_BLOCK: 5 is not a multiple"),
            ({"select": 7}, "NSA_SELECT_BLOCK: 7 is not a multiple"),
            ({"compress": 8}, "NSA_COMPRESS_BLOCK: 8 is above NSA_SELECT_BLOCK=6"),
            ({"count": 2}, "NSA_SELECT_COUNT: 2 leaves no room"),
        ],
    )
    def test_sizes(self, sizes, message):
        with pytest.raises(ConfigError, match=message):
            options(**sizes)

    def layers(self, **symbols):
        chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
        return [Layer.of("command line", "test", {**chosen, **symbols})]

    def test_symbols(self):
        found = resolve_config(Tree(), self.layers(NSA_PHI_MEAN=True)).model.attention.pattern
        assert found == options(**PAPER, phi="mean", hidden=0)

    @pytest.mark.parametrize(
        "symbols",
        [
            {"RECIPROCAL": True},
            {"RA_CROSS_TOKEN": True},
            {"MLP_CROSS_TOKEN": True},
            {"ATTENTION_PROJECTION_GROUPED": False, "ATTENTION_PROJECTION_DENSE": True},
            {"DROPOUT": "0.1"},
            {"NSA_COMPRESS_BLOCK": 2048, "NSA_SELECT_BLOCK": 2048},
        ],
        ids=lambda given: next(reversed(given)),
    )
    def test_what_does_not_go_with_it(self, symbols):
        with pytest.raises(ConfigError, match=next(iter(symbols)).split("_PROJECTION")[0]):
            resolve_config(Tree(), self.layers(**symbols))

    @pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
    def test_gates_start_at_a_third(self, gate):
        parts = {"nsa": {"gate": gate}}
        model = GPT(make_model_config("grouped", "nsa", parts=parts))
        model.init_weights(0)
        gates = model.h[1].attn.pattern.gates(torch.randn(2, 9, 32))
        assert gates.shape == (3, 2, 4, 9)
        torch.testing.assert_close(gates, torch.full_like(gates, 1 / 3))
