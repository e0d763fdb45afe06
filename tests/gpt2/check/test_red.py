"""Every check is green on what is right, and red on a fault planted in the code that trains."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpt2.attention.base import Attention
from gpt2.attention.reciprocal.module import Reciprocal
from gpt2.attention.state import AttentionView, BlockState
from gpt2.cache import BlockCache
from gpt2.check import CHECKS
from gpt2.check.cases import Case, Cases, checked_layers, find_cases
from gpt2.check.run import Result, run_here
from gpt2.config import ModelConfig
from gpt2.mlp.mlp_attn_gate.module import MlpAttnGate
from gpt2.mlp.mlp_cross_token.module import MlpCrossToken
from gpt2.model import GPT
from lib.errors import Problem
from lib.optim.adamwspam.module import Adamwspam
from lib.pruning.mask import MaskPruner
from lib.repro.rng import rng_state, set_rng_state

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def study() -> Cases:
    return find_cases(checked_layers(Path(), "gpt2-ratio-ablation"))


@pytest.fixture(autouse=True)
def _as_before():
    """What training sets for a whole process."""
    state, threads = rng_state(torch.device("cpu")), torch.get_num_threads()
    yield
    set_rng_state(state, torch.device("cpu"))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


def case_of(study: Cases, slug: str) -> Case:
    (found,) = [case for case in study.every if case.slug == slug]
    return found


def run(study: Cases, slug: str, *names: str) -> dict[str, Result]:
    case = case_of(study, slug)
    parent = {c.slug: c for c in study.every if c.slug == case.parent}
    return run_here(case, [CHECKS[name] for name in names], parent)


def reciprocal_does_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Reciprocal, "add_", lambda self, *rest: None)
    patch.setattr(Reciprocal, "backward_", lambda self, *rest: ())


def one_more_is_declared(patch: pytest.MonkeyPatch) -> None:
    right = ModelConfig.num_params
    patch.setattr(ModelConfig, "num_params", lambda self: right(self) + 1)


def mix_is_detached(patch: pytest.MonkeyPatch) -> None:
    def forward(self: Any, h: Any, view: AttentionView, state: BlockState) -> Any:
        with torch.no_grad():
            mixed = self.up(view.weights_BTS @ self.down(h))
        return torch.add(h, mixed, alpha=self.alpha)

    patch.setattr(MlpCrossToken, "forward", forward)


def gate_goes_to_the_next_call(patch: pytest.MonkeyPatch) -> None:
    right = MlpAttnGate.forward

    def forward(self: Any, h: Any, view: AttentionView, state: BlockState) -> Any:
        out = right(self, h, view, state)
        kept = vars(self).get("kept", state.head_scale_BTN)
        vars(self)["kept"], state.head_scale_BTN = state.head_scale_BTN, kept
        return out

    patch.setattr(MlpAttnGate, "forward", forward)


def gate_pools_over_the_future(patch: pytest.MonkeyPatch) -> None:
    right = MlpAttnGate.forward

    def forward(self: Any, h: Any, view: AttentionView, state: BlockState) -> Any:
        right(self, h.mean(1, keepdim=True).expand_as(h), view, state)
        return h

    patch.setattr(MlpAttnGate, "forward", forward)


def rows_leak(patch: pytest.MonkeyPatch) -> None:
    right = Attention.forward

    def forward(self: Any, x: Any, state: BlockState, cache: Any = None) -> Any:
        out, view = right(self, x, state, cache)
        return out + 1e-6 * out.mean(0, keepdim=True), view

    patch.setattr(Attention, "forward", forward)


def keys_are_not_swapped(patch: pytest.MonkeyPatch) -> None:
    right = Reciprocal._scaled_keys
    patch.setattr(Reciprocal, "_scaled_keys", lambda self, *rest: right(self, *rest) * 1.001)


def the_mix_has_another_width(patch: pytest.MonkeyPatch) -> None:
    right = MlpCrossToken.__init__

    def init(self: Any, options: Any, hidden: int, width: int, site: Any) -> None:
        right(self, options, hidden, width, site)
        # Not at the small size, where nothing is as wide.
        if hidden > 1024:
            self.up = torch.nn.Linear(width + 1, hidden, bias=False)

    patch.setattr(MlpCrossToken, "__init__", init)


def too_much_is_kept(patch: pytest.MonkeyPatch) -> None:
    right = Attention.forward

    def forward(self: Any, x: Any, *rest: Any) -> Any:
        out, view = right(self, x, *rest)
        return out * x.repeat(1, 1, 10000)[..., ::10000].exp(), view

    patch.setattr(Attention, "forward", forward)


def queries_are_kept_in_another_order(patch: pytest.MonkeyPatch) -> None:
    right = BlockCache.extend

    def extend(self: Any, name: str, new: Any, dim: int, reach: int | None = None) -> Any:
        whole = right(self, name, new, dim, reach)
        return whole.flip(dim) if name == "q" and self.position > 20 else whole

    patch.setattr(BlockCache, "extend", extend)


def masks_are_not_loaded(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MaskPruner, "load_state_dict", lambda self, state: None)


def weights_are_not_seeded(patch: pytest.MonkeyPatch) -> None:
    right = GPT.init_weights

    @torch.no_grad()
    def init(self: Any, seed: int) -> None:
        right(self, seed)
        self.wte.weight.add_(int.from_bytes(os.urandom(2), "big") * 1e-6)

    patch.setattr(GPT, "init_weights", init)


def nothing_is_pruned(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(MaskPruner, "after_step", lambda self, *rest: None)


def spam_is_adamw(patch: pytest.MonkeyPatch) -> None:
    for name in ("_reset", "_clip", "_damp"):
        patch.setattr(Adamwspam, name, lambda self, *rest: None)
    patch.setattr("lib.optim.adamwspam.options.AdamwspamOptions.warmup_factor", lambda *rest: 1.0)


RED: dict[str, tuple[str, str, Plant]] = {
    "full_size dimensions": ("full_size", "golden-gate-cross", the_mix_has_another_width),
    "full_size memory": ("full_size", "baseline", too_much_is_kept),
    "distinct": ("distinct", "ra", reciprocal_does_nothing),
    "declared": ("declared", "mla", one_more_is_declared),
    "gradients": ("gradients", "golden-gate-cross", mix_is_detached),
    "steps": ("steps", "golden-gate", gate_goes_to_the_next_call),
    "causal": ("causal", "golden-gate", gate_pools_over_the_future),
    "isolated": ("isolated", "baseline", rows_leak),
    "isolated calls": ("isolated", "golden-gate", gate_goes_to_the_next_call),
    "reference": ("reference", "ra", keys_are_not_swapped),
    "decode": ("decode", "ra", queries_are_kept_in_another_order),
    "reload": ("reload", "pruned-50", masks_are_not_loaded),
    "repeat": ("repeat", "baseline", weights_are_not_seeded),
    "pruned": ("pruned", "pruned-50", nothing_is_pruned),
    "pruned optimizer": ("pruned", "baseline", spam_is_adamw),
    "parallel": ("parallel", "baseline", weights_are_not_seeded),
}


@pytest.mark.parametrize("fault", RED)
def test_a_planted_fault_is_found(study, monkeypatch, fault):
    name, slug, plant = RED[fault]
    plant(monkeypatch)
    result = run(study, slug, name)[name]
    assert result.state == "failed"
    assert all(finding.expected and finding.found for finding in result.findings)


@pytest.mark.parametrize("slug", ["pruned-50", "full"])
def test_what_is_right_is_green(study, slug):
    found = run(study, slug, *CHECKS)
    states = {name: result.state for name, result in found.items()}
    assert states == dict.fromkeys(CHECKS, "passed") | {"data": "absent"}, found


def test_a_step_that_does_not_resolve_says_why(study):
    broken = replace(case_of(study, "ra"), config=None, problems=(Problem("no", "step ra"),))
    found = run_here(broken, list(CHECKS.values()), {})
    assert {name: r.state for name, r in found.items()} == {"resolve": "failed"}
    assert found["resolve"].findings[0].found == "step ra: no"
