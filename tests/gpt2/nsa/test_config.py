"""Incompatible sizes, and settings that native sparse attention does not support."""

import re

import pytest

from gpt2.study.notes import notes
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from tests.gpt2.nsa.sizes import NAMES, PAPER, options

CONFLICT, DEPENDENCY = "config.conflict", "config.unmet-dependency"
NO_CHOICE = "no query has a choice"
DENSE = {"ATTENTION_PROJECTION_GROUPED": False, "ATTENTION_PROJECTION_DENSE": True}


def config(**symbols):
    chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    layer = ConfigLayer.of("command line", "test", {**chosen, **symbols})
    return resolve_config(KconfigTree(), [layer])


def pattern(**symbols):
    return config(**symbols).model.attention.pattern


def branches(*names):
    return {f"NSA_BRANCH_{name.upper()}": name in names for name in NAMES}


def test_symbols_reach_the_options_and_sizes_of_what_is_left_out_are_not_set():
    assert pattern(NSA_PHI_MEAN=True) == options(**PAPER, phi="mean", hidden=0)
    found = pattern(NSA_BACKEND_GATHER=True, NSA_RANGES_ADAPTIVE=True)
    assert (found.backend, found.ranges, found.ranges_min) == ("gather", "adaptive", 1024)
    drawn = {"NSA_SELECT_BY_RANDOM": True, "NSA_SELECT_COUNT": 8}
    found = pattern(**drawn, NSA_BRANCH_COMPRESSED=False)
    assert (found.compress, found.stride, found.phi, found.hidden) == (0, 0, "", 0)
    found = pattern(**branches("compressed"))
    assert (found.select, found.count, found.window, found.gate) == (0, 0, 0, "")
    assert found.select_by == "" and not found.ranks and found.branches == NAMES[:1]


@pytest.mark.parametrize(
    ("symbols", "code", "words"),
    [
        ({"NSA_COMPRESS_BLOCK": 40}, CONFLICT, "^NSA_COMPRESS_BLOCK: .*_STRIDE=16, got 40"),
        ({"NSA_SELECT_BLOCK": 72}, CONFLICT, "^NSA_SELECT_BLOCK: .*_STRIDE=16, got 72"),
        ({"NSA_COMPRESS_BLOCK": 128}, CONFLICT, "^NSA_COMPRESS_BLOCK: .*_BLOCK=64, got 128"),
        (
            {"NSA_COMPRESS_BLOCK": 2048, "NSA_SELECT_BLOCK": 2048},
            CONFLICT,
            "^NSA_COMPRESS_BLOCK: .*BLOCK_SIZE=1024, got 2048",
        ),
        ({"DROPOUT": "0.1"}, CONFLICT, "^DROPOUT: .*got 0.1"),
        (branches(), CONFLICT, "^NSA_BRANCH_WINDOW: "),
        (branches("compressed") | {"NSA_COMPRESS_BLOCK": 1024}, CONFLICT, NO_CHOICE),
        (branches("window") | {"NSA_WINDOW": 1}, CONFLICT, NO_CHOICE),
        (
            {"NSA_SELECT_BY_RANDOM": True},
            CONFLICT,
            "^NSA_SELECT_BY: .* 16 x NSA_SELECT_BLOCK=64 >= BLOCK_SIZE=1024.*SET=NSA_SELECT_COUNT=15",
        ),
        ({"RECIPROCAL": True}, DEPENDENCY, "^RECIPROCAL=y"),
        ({"RA_CROSS_TOKEN": True}, DEPENDENCY, "^RA_CROSS_TOKEN=y"),
        ({"MLP_CROSS_TOKEN": True}, DEPENDENCY, "^MLP_CROSS_TOKEN=y"),
        ({"NSA_RANGES_MERGED": True}, DEPENDENCY, "^NSA_RANGES_MERGED=y"),
        (DENSE, DEPENDENCY, "ATTENTION_PROJECTION_GROUPED=y"),
    ],
)
def test_what_is_not_supported_is_refused(symbols, code, words):
    with pytest.raises(ConfigError) as caught:
        config(**symbols)
    assert caught.value.codes == [code]
    problem = caught.value.problems[0]
    assert re.search(words, f"{problem.what} {problem.next}")


def test_the_nearest_supported_sizes_pass():
    config(**branches("compressed"), NSA_COMPRESS_BLOCK=1008)
    config(**branches("window"), NSA_WINDOW=2)
    config(NSA_SELECT_BY_RANDOM=True, NSA_SELECT_COUNT=15)


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
def test_notes_of_a_plan(length, expected):
    found = notes(config(BLOCK_SIZE=length))
    for note, (tag, value) in zip(found, expected, strict=True):
        assert note.tag == tag and value in note.text
