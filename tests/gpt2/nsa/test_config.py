"""Incompatible sizes, and settings that native sparse attention does not support."""

import pytest

from gpt2.study.notes import notes
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from tests.gpt2.nsa.sizes import NAMES, PAPER, options


class TestConfiguration:
    """Incompatible sizes and unsupported settings."""

    @pytest.mark.parametrize(
        ("sizes", "symbol", "values"),
        [
            ({"compress": 5}, "NSA_COMPRESS_BLOCK", ("NSA_COMPRESS_STRIDE=2", "got 5")),
            ({"select": 7}, "NSA_SELECT_BLOCK", ("NSA_COMPRESS_STRIDE=2", "got 7")),
            ({"compress": 8}, "NSA_COMPRESS_BLOCK", ("NSA_SELECT_BLOCK=6", "got 8")),
        ],
    )
    def test_sizes(self, sizes, symbol, values):
        with pytest.raises(ConfigError) as caught:
            options(**sizes)
        assert caught.value.codes == ["config.conflict"]
        what = caught.value.problems[0].what
        assert what.startswith(f"{symbol}:") and all(value in what for value in values)

    def config(self, **symbols):
        chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
        layer = ConfigLayer.of("command line", "test", {**chosen, **symbols})
        return resolve_config(KconfigTree(), [layer])

    def test_symbols(self):
        found = self.config(NSA_PHI_MEAN=True).model.attention.pattern
        assert found == options(**PAPER, phi="mean", hidden=0)
        pattern = self.config(NSA_BACKEND_GATHER=True, NSA_RANGES_ADAPTIVE=True)
        pattern = pattern.model.attention.pattern
        assert (pattern.backend, pattern.ranges, pattern.ranges_min) == ("gather", "adaptive", 1024)

    @pytest.mark.parametrize(
        "symbols",
        [
            {"RECIPROCAL": True},
            {"RA_CROSS_TOKEN": True},
            {"MLP_CROSS_TOKEN": True},
            {"NSA_RANGES_MERGED": True},
            {"ATTENTION_PROJECTION_GROUPED": False, "ATTENTION_PROJECTION_DENSE": True},
        ],
        ids=lambda symbols: next(reversed(symbols)),
    )
    def test_unsupported_symbols(self, symbols):
        with pytest.raises(ConfigError) as caught:
            self.config(**symbols)
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
            self.config(**symbols)
        found = [p for p in caught.value.problems if p.what.startswith(f"{symbol}:")]
        assert [p.code for p in found] == ["config.conflict"] and value in found[0].what

    def test_blocks_cannot_be_drawn_where_all_are_taken(self):
        with pytest.raises(ConfigError) as caught:
            self.config(NSA_SELECT_BY_RANDOM=True)
        assert caught.value.codes == ["config.conflict"]
        assert caught.value.problems[0].what.startswith("NSA_SELECT_BY:")
        assert "16 x NSA_SELECT_BLOCK=64 >= BLOCK_SIZE=1024" in caught.value.problems[0].what
        assert "SET=NSA_SELECT_COUNT=15" in caught.value.problems[0].next
        self.config(NSA_SELECT_BY_RANDOM=True, NSA_SELECT_COUNT=15)

    def test_one_branch_has_to_be_left(self):
        none = {f"NSA_BRANCH_{name.upper()}": False for name in NAMES}
        with pytest.raises(ConfigError) as caught:
            self.config(**none)
        assert caught.value.codes == ["config.conflict"]
        assert caught.value.problems[0].what.startswith("NSA_BRANCH_WINDOW:")

    @pytest.mark.parametrize(
        ("branch", "one", "two"),
        [
            ("COMPRESSED", {"NSA_COMPRESS_BLOCK": 1024}, {"NSA_COMPRESS_BLOCK": 1008}),
            ("WINDOW", {"NSA_WINDOW": 1}, {"NSA_WINDOW": 2}),
        ],
    )
    def test_one_key_for_each_query_is_refused(self, branch, one, two):
        alone = {f"NSA_BRANCH_{name.upper()}": name.upper() == branch for name in NAMES}
        with pytest.raises(ConfigError, match="no query has a choice") as caught:
            self.config(**alone, **one)
        assert caught.value.codes == ["config.conflict"]
        self.config(**alone, **two)

    def test_sizes_of_what_is_left_out_are_not_set(self):
        pattern = self.config(
            NSA_SELECT_BY_RANDOM=True, NSA_SELECT_COUNT=8, NSA_BRANCH_COMPRESSED=False
        ).model.attention.pattern
        assert (pattern.compress, pattern.stride, pattern.phi, pattern.hidden) == (0, 0, "", 0)
        pattern = self.config(
            NSA_BRANCH_SELECTED=False, NSA_BRANCH_WINDOW=False
        ).model.attention.pattern
        assert (pattern.select, pattern.count, pattern.window, pattern.gate) == (0, 0, 0, "")
        assert pattern.select_by == "" and not pattern.ranks and pattern.branches == NAMES[:1]

    @pytest.mark.parametrize(
        ("length", "expected"),
        [
            (
                1024,
                [
                    ("WARN", "NSA_SELECT_COUNT=16 x NSA_SELECT_BLOCK=64 >= BLOCK_SIZE=1024"),
                    ("WARN", "NSA: 0.55"),
                ],
            ),
            (1025, [("WARN", "NSA: 0.55")]),
            (4096, [("NOTE", "NSA: 1.38")]),
        ],
    )
    def test_notes_of_a_plan(self, length, expected):
        found = notes(self.config(BLOCK_SIZE=length))
        for note, (tag, value) in zip(found, expected, strict=True):
            assert note.tag == tag and value in note.text
