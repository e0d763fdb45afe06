"""Incompatible sizes, and settings that native sparse attention does not support."""

import pytest

from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from tests.gpt2.nsa.sizes import PAPER, options


class TestConfiguration:
    """Incompatible sizes and unsupported settings."""

    @pytest.mark.parametrize(
        ("sizes", "symbol", "code", "values"),
        [
            (
                {"compress": 5},
                "NSA_COMPRESS_BLOCK",
                "config.conflict",
                ("NSA_COMPRESS_STRIDE=2", "got 5"),
            ),
            (
                {"select": 7},
                "NSA_SELECT_BLOCK",
                "config.conflict",
                ("NSA_COMPRESS_STRIDE=2", "got 7"),
            ),
            (
                {"compress": 8},
                "NSA_COMPRESS_BLOCK",
                "config.conflict",
                ("NSA_SELECT_BLOCK=6", "got 8"),
            ),
        ],
    )
    def test_sizes(self, sizes, symbol, code, values):
        with pytest.raises(ConfigError) as caught:
            options(**sizes)
        assert caught.value.codes == [code]
        what = caught.value.problems[0].what
        assert what.startswith(f"{symbol}:") and all(value in what for value in values)

    def layers(self, **symbols):
        chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
        return [ConfigLayer.of("command line", "test", {**chosen, **symbols})]

    def test_symbols(self):
        found = resolve_config(
            KconfigTree(), self.layers(NSA_PHI_MEAN=True)
        ).model.attention.pattern
        assert found == options(**PAPER, phi="mean", hidden=0)

    @pytest.mark.parametrize(
        "symbols",
        [
            {"RECIPROCAL": True},
            {"RA_CROSS_TOKEN": True},
            {"MLP_CROSS_TOKEN": True},
            {"ATTENTION_PROJECTION_GROUPED": False, "ATTENTION_PROJECTION_DENSE": True},
        ],
        ids=lambda symbols: next(reversed(symbols)),
    )
    def test_unsupported_symbols(self, symbols):
        with pytest.raises(ConfigError) as caught:
            resolve_config(KconfigTree(), self.layers(**symbols))
        assert next(iter(symbols)).split("_PROJECTION")[0] in str(caught.value)

    @pytest.mark.parametrize(
        ("symbols", "symbol", "value"),
        [
            ({"DROPOUT": "0.1"}, "DROPOUT", "got 0.1"),
            (
                {"NSA_COMPRESS_BLOCK": 2048, "NSA_SELECT_BLOCK": 2048},
                "NSA_COMPRESS_BLOCK",
                "BLOCK_SIZE=1024, got 2048",
            ),
        ],
    )
    def test_conflicts_with_the_model(self, symbols, symbol, value):
        with pytest.raises(ConfigError) as caught:
            resolve_config(KconfigTree(), self.layers(**symbols))
        found = [p for p in caught.value.problems if p.what.startswith(f"{symbol}:")]
        assert [p.code for p in found] == ["config.conflict"] and value in found[0].what
