"""Products of bf16 matrices on a CPU that has no instructions for them.

torch accumulates the products in fp32, by a scalar loop that takes about ten times as long as the
fp32 product of the same matrices.
"""

import warnings
from typing import Any

import torch
from torch import Tensor


class NarrowProducts:
    """Replacement of torch's kernels: fp32 products of bf16 values, rounded to bf16 once.

    Only the kernels are replaced. Autocast, autograd, and modes that observe the types of operations
    come before them and see bf16.
    """

    def __init__(self) -> None:
        self._mm = torch.library.get_kernel("aten::mm", "CPU")
        self._addmm = torch.library.get_kernel("aten::addmm", "CPU")
        self._library = torch.library.Library("aten", "IMPL")
        with warnings.catch_warnings():
            # torch reports that its own kernels are replaced, which is the purpose.
            warnings.simplefilter("ignore", UserWarning)
            for name, kernel in (("mm", self._product), ("addmm", self._sum)):
                self._library.impl(name, kernel, "CPU", with_keyset=True, allow_override=True)

    def restore(self) -> None:
        """Restore torch's kernels."""
        self._library._destroy()

    def _product(self, keys: Any, a: Tensor, b: Tensor) -> Tensor:
        if not _all_narrow(a, b):
            product: Tensor = self._mm.call_boxed(keys, a, b)
            return product
        product = self._mm.call_boxed(keys, a.float(), b.float())
        return product.bfloat16()

    def _sum(
        self, keys: Any, c: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1
    ) -> Tensor:
        factors = {"beta": beta, "alpha": alpha}
        if not _all_narrow(c, a, b):
            total: Tensor = self._addmm.call_boxed(keys, c, a, b, **factors)
            return total
        wide = (each.float() for each in (c, a, b))
        total = self._addmm.call_boxed(keys, *wide, **factors)
        return total.bfloat16()


def _all_narrow(*tensors: Tensor) -> bool:
    """Return whether all are in bf16; torch's kernel raises an error if types differ."""
    return all(each.dtype is torch.bfloat16 for each in tensors)
