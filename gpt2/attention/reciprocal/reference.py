"""Reference reciprocal attention, row by row.

B batch, T tokens, N heads, H head dim, c visible columns.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from gpt2.attention.reciprocal.options import ReciprocalOptions


def score(
    q_BNTH: Tensor,
    k_BNTH: Tensor,
    i: int,
    columns: Sequence[int],
    parameters: Mapping[str, Tensor],
    options: ReciprocalOptions,
) -> Tensor:
    """Return α (q_j · k_i)/√H for i − W ≤ j ≤ i, else 0, for every j in ``columns``: BNc."""
    alpha_N1 = parameters["alpha"][:, None] if options.learnable else options.alpha
    dots_BNc = (q_BNTH[:, :, columns] * k_BNTH[:, :, i : i + 1]).sum(-1) / q_BNTH.shape[-1] ** 0.5
    inside_c = [float(i - options.window <= j <= i) for j in columns]
    return alpha_N1 * dots_BNc * dots_BNc.new_tensor(inside_c)
