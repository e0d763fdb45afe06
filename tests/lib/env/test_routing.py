"""Detection of the attention kernel, compared with a profile of the same call."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.profiler import ProfilerActivity, profile

from lib.env.observe import detect_sdpa_kernel

CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "causal": ({"is_causal": True}, "flash"),
    "masked": ({"attn_mask": torch.ones(8, 8).tril().bool()}, "flash"),
    "dropout": ({"is_causal": True, "dropout_p": 0.5}, "math"),
}


def queries() -> Tensor:
    return torch.zeros(1, 2, 8, 16, requires_grad=True)


@pytest.mark.parametrize("call", CALLS)
def test_it_is_read_from_what_came_out(call: str) -> None:
    arguments, kernel = CALLS[call]
    q = queries()
    assert detect_sdpa_kernel(F.scaled_dot_product_attention(q, q, q, **arguments)) == kernel
    # Operations on the output do not matter.
    shared = F.scaled_dot_product_attention(q, q[:, :1], q[:, :1], enable_gqa=True, **arguments)
    assert detect_sdpa_kernel(shared[..., :3].transpose(1, 2) * 2) == kernel


def test_a_pinned_kernel_is_the_one() -> None:
    q = queries()
    with sdpa_kernel(SDPBackend.MATH):
        assert detect_sdpa_kernel(F.scaled_dot_product_attention(q, q, q)) == "math"
    assert detect_sdpa_kernel(q * 2) == "unknown"


def test_a_profile_says_the_same() -> None:
    names = {"flash": "flash_attention", "math": "attention_math"}
    for arguments, kernel in CALLS.values():
        q = queries()
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            F.scaled_dot_product_attention(q, q, q, **arguments)
        found = [event.name for event in seen.events() if "::_scaled_dot_product" in event.name]
        assert any(f"_scaled_dot_product_{names[kernel]}" in name for name in found)
