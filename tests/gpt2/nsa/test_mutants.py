"""Planted faults, and the test that must detect each of them.

B batch, T queries, K key/value heads, g query heads per key/value head, M compressed blocks,
H head dim.
"""

import importlib
import sys
from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2 import model
from gpt2.attention import projections
from gpt2.attention.positions import Rope
from gpt2.nsa import branches, gather, query_major
from gpt2.nsa import options as nsa_options
from gpt2.nsa import select as nsa_select
from gpt2.nsa.cache import NsaCache, RingBuffer
from gpt2.nsa.module import BranchGates

HERE = Path(__file__).parent
FILES = sorted(path.stem for path in HERE.glob("test_*.py") if path != Path(__file__))
Plant = Callable[[pytest.MonkeyPatch], None]


def everywhere(right: Any, make: Callable[[Any], Any]) -> Plant:
    """Return a patch that replaces a function by ``make(right)`` under every imported name."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        wrong = make(right)
        for name, module in list(sys.modules.items()):
            if name.startswith(("gpt2.attention", "gpt2.nsa", "tests.gpt2.nsa")):
                for key in [key for key, value in vars(module).items() if value is right]:
                    patch.setattr(module, key, wrong)

    return plant


def method(owner: type, name: str, make: Callable[[Any], Any]) -> Plant:
    """Return a patch that replaces a method by ``make(right)``."""
    return lambda patch: patch.setattr(owner, name, make(vars(owner)[name]))


def _first_key_alone(right: Any) -> Any:
    """Read only the first key, as ``is_causal`` does for one query and many keys."""

    def read(self: Any, branch: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return right(self, branch, q, k[:, :, :1], v[:, :, :1])

    return read


def _masked_after(right: Any) -> Any:
    """Include invisible blocks in the ranking softmax."""

    def attend(q_BKgTH: Tensor, k: Tensor, v: Tensor, options: Any, first: int = 0) -> Any:
        context, _ = right(q_BKgTH, k, v, options, first)
        weights_BKgTM = (q_BKgTH @ k[:, :, None].mT).softmax(-1)
        length = first + q_BKgTH.shape[3]
        for t in range(first, length):
            weights_BKgTM[..., t - first, options.compressed(t + 1) :] = 0
        count = -(-length // options.select)
        scores = nsa_select.score_blocks(weights_BKgTM, options, count)
        return context, nsa_select.select_blocks(scores, options, first)

    return attend


def _later_overlap(right: Any) -> Any:
    """Score with + m + n in equation 9."""

    def score(weights_BKgTM: Tensor, options: Any, count: int) -> Tensor:
        reach = options.compress // options.stride - 1
        return right(F.pad(weights_BKgTM[..., reach:], (0, reach)), options, count)

    return score


def _averaged_logits(right: Any) -> Any:
    """Average logits instead of weights (log-softmax differs by a constant per row)."""

    def score(weights_BKgTM: Tensor, options: Any, count: int) -> Tensor:
        mean = weights_BKgTM.log().mean(2, keepdim=True).exp()
        return right(mean / mean.sum(-1, keepdim=True).clamp(min=1e-300), options, count)

    return score


def _own_block_only_when_complete(right: Any) -> Any:
    def select(scores_BKTJ: Tensor, options: Any, first: int) -> Tensor:
        tokens_T1 = torch.arange(first, first + scores_BKTJ.shape[2])[:, None]
        partial = (tokens_T1 + 1) % options.select != 0
        chosen_BKTn = right(scores_BKTJ, options, first)
        return chosen_BKTn.masked_fill(partial & (chosen_BKTn == tokens_T1 // options.select), -1)

    return select


def _heads_are_columns(x: Tensor, head_dim: int) -> Tensor:
    """Take element h of head n from index h·N + n, so that heads are mixed."""
    return x.unflatten(-1, (head_dim, -1)).movedim(-1, 1)


def _not_after_a_prompt(right: Any) -> Any:
    """Do not write prompt tokens into the ring buffer of tokens to be compressed."""

    def write(self: Any, new_BKTH: Tensor, position: int) -> Tensor:
        if self.size != 4 or new_BKTH.shape[2] == 1:
            return right(self, new_BKTH, position)
        return right(self, torch.zeros_like(new_BKTH), position)

    return write


def _by_the_formula(right: Any) -> Any:
    """Count the published bound instead of the keys read."""

    def weigh(self: Any, branch: str, q: Tensor, k: Tensor) -> Tensor:
        weights, options = right(self, branch, q, k), self.options
        bound = {"selected": options.count * options.select, "window": options.window}
        self.reads[branch] += bound.get(branch, k.shape[2]) - k.shape[2]
        return weights

    return weigh


def _late_binding(right: Any) -> Any:
    """Close over the loop variable, so that the last block is recomputed every time."""
    called = []

    def checkpoint(block: Any, *given: Any, **named: Any) -> Any:
        called.append(block)
        return right(lambda *again: called[-1](*again), *given, **named)

    return checkpoint


def _first_value(right: Any) -> Any:
    def attend(q: Tensor, k: Tensor, v: Tensor, options: Any, first: int = 0) -> Any:
        context, chosen = right(q, k, v, options, first)
        return v[:, :, None, :1].expand_as(context), chosen

    return attend


def _sentinel(right: Any) -> Any:
    """Mask with −10000 instead of −∞."""

    def hide_(self: Any, scores: Tensor) -> None:
        hidden = torch.zeros_like(scores)
        right(self, hidden)
        scores.masked_fill_(hidden.isinf(), -1e4)

    return hide_


def _as_one_vector(right: Any) -> Any:
    """Rotate all heads as one vector of C elements."""

    def rotate(
        self: Any, heads: list[Tensor], first: int = 0, step: int = 1, rotation: Any = None
    ) -> list[Tensor]:
        turned, encoding = [], copy(self)
        for x_BNTH in heads:
            whole_B1TC = x_BNTH.transpose(1, 2).flatten(2)[:, None]
            encoding.width = whole_B1TC.shape[-1]
            (x_B1TC,) = right(encoding, [whole_B1TC], first, step)
            turned.append(projections.split_heads(x_B1TC[:, 0], x_BNTH.shape[-1]))
        return turned

    return rotate


def _a_token_late(right: Any) -> Any:
    """Move ranges to the next token if there is one."""

    def make(blocks_rn: Tensor, tokens_r: Tensor, size: int, merged: bool) -> Any:
        ranges = right(blocks_rn, tokens_r, size, merged)
        later = (ranges.ends_f <= tokens_r[-1]).long()
        return replace(ranges, starts_f=ranges.starts_f + later, ends_f=ranges.ends_f + later)

    return make


def _never_wrapped(self: Any, start: int, stop: int) -> Tensor:
    return torch.arange(start, stop).clamp(max=self.size - 1)


MUTANTS: dict[str, tuple[Plant, str]] = {
    "is_causal on a one-row query": (
        method(NsaCache, "_read", _first_key_alone),
        "test_cache.py::TestDecoding::test_equals_the_forward_pass[blocks-13-False]",
    ),
    "mask after the softmax": (
        everywhere(nsa_select.attend_compressed, _masked_after),
        "test_field.py::TestLaterTokens::test_change_no_selection",
    ),
    "window off by one": (
        everywhere(branches.attend_window, lambda right: lambda q, k, v, w: right(q, k, v, w + 1)),
        "test_field.py::TestField::test_window",
    ),
    "partial block excluded": (
        everywhere(nsa_select.select_blocks, _own_block_only_when_complete),
        "test_selection.py::TestSelection::test_equals_a_search_from_the_definition",
    ),
    "equation 9 with + m + n": (
        everywhere(nsa_select.score_blocks, _later_overlap),
        "test_selection.py::TestSelection::test_weights_count_as_far_as_they_overlap",
    ),
    "logits averaged before the softmax": (
        everywhere(nsa_select.score_blocks, _averaged_logits),
        "test_selection.py::TestSelection::test_heads_of_a_group_are_summed_after_their_softmax",
    ),
    "a head's numbers taken across all heads": (
        everywhere(projections.split_heads, lambda right: _heads_are_columns),
        "test_reference.py::TestAgainstReference::test_lengths[blocks-13]",
    ),
    "trimmed window indexed absolutely": (
        method(RingBuffer, "_places", lambda right: _never_wrapped),
        "test_cache.py::TestDecoding::test_equals_the_forward_pass[blocks-1-False]",
    ),
    "raw ring not filled by a prompt": (
        method(RingBuffer, "write", _not_after_a_prompt),
        "test_cache.py::TestDecoding::test_equals_the_forward_pass[blocks-7-False]",
    ),
    "reads taken from the formula": (
        method(NsaCache, "_weigh", _by_the_formula),
        "test_cache.py::TestReads::test_a_token_reads_what_it_sees",
    ),
    "late-binding closure in checkpointing": (
        lambda patch: patch.setattr(model, "checkpoint", _late_binding(model.checkpoint)),
        "test_gradients.py::test_blocks_computed_again_have_the_same",
    ),
    "a branch replaced by its first value": (
        everywhere(nsa_select.attend_compressed, _first_value),
        "test_field.py::TestField::test_compressed",
    ),
    "gates frozen": (
        method(BranchGates, "forward", lambda right: lambda self, x: right(self, x).detach()),
        "test_gradients.py::test_every_parameter_has_one[blocks-True-mean-sigmoid]",
    ),
    "rotation over the flattened heads": (
        method(Rope, "encode_all", _as_one_vector),
        "test_rope.py::TestPositions::test_scores_of_every_branch_depend_on_distances[True]",
    ),
    "a mask of -10000": (
        method(query_major.QueryChunk, "hide_", _sentinel),
        "test_field.py::TestLaterTokens::test_are_not_seen_however_low_the_scores_are",
    ),
    "a gathered range that lies a token late": (
        everywhere(gather.token_ranges, _a_token_late),
        "test_field.py::TestLaterTokens::test_have_no_gradient[lists-3]",
    ),
    "blocks where gathering is asked for": (
        everywhere(nsa_options.resolve_backend, lambda right: lambda options, device: "blocks"),
        "test_reference.py::TestAgainstReference::test_lengths[merged-13]",
    ),
}


class Failures:
    """Failures of a pytest run: phase and exception type."""

    def __init__(self) -> None:
        self.found: set[tuple[str, str]] = set()

    def pytest_exception_interact(self, call: pytest.CallInfo[Any]) -> None:
        assert call.excinfo
        self.found.add((call.when, call.excinfo.typename))


@pytest.mark.long
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_breaks_the_test_that_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that the named test fails on an assertion, and passes without the fault."""
    for stem in FILES:
        # Before the fault is there to be imported.
        importlib.import_module(f"tests.gpt2.nsa.{stem}")
    plant, test = MUTANTS[name]
    alone = ["-o", "addopts=--import-mode=importlib", "-p", "no:cacheprovider", "-p", "no:xdist"]
    arguments, failures = [*alone, "-q", str(HERE / test)], Failures()
    plant(monkeypatch)
    assert pytest.main(arguments, [failures]) == pytest.ExitCode.TESTS_FAILED
    assert failures.found == {("call", "AssertionError")}
    monkeypatch.undo()
    assert pytest.main(arguments) == pytest.ExitCode.OK
