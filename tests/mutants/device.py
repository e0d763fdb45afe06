"""Faults of the forms that a GPU or a compiler runs."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gpt2 import model
from gpt2.attention import triton
from tests.mutants.mutant import Mutant, edited, replaced


def _doubled(right: Any) -> Any:
    """Double the gradient of the keys that a kernel has written."""

    def launch(name: str, spec: Any, tensors: Mapping[str, Tensor]) -> None:
        right(name, spec, tensors)
        if name == "column_gradients":
            tensors["dk"].mul_(2)

    return launch


_COMPILED = {"COMPILE": True}

MUTANTS = (
    Mutant(
        "a Triton kernel doubles the gradient of the keys",
        "ra",
        {"device": ("triton-kernels", r"the gradient of h\.0\.attn\.c_attn\.weight")},
        replaced(triton, "_launch", _doubled),
        quick=True,
    ),
    Mutant(
        "a compiled loss is smoothed",
        "baseline",
        {"device": ("compiled-loss", "^the loss")},
        edited(
            model,
            "linear_cross_entropy",
            "F.cross_entropy(_wide(logits_XV), targets_X,",
            "F.cross_entropy(_wide(logits_XV), targets_X,"
            " label_smoothing=0.1 * torch.compiler.is_compiling(),",
        ),
        settings=_COMPILED,
    ),
)
