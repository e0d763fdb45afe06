"""Each branch is full attention where it leaves nothing out."""

import pytest
import torch

from gpt2.attention.nsa.selected import attend_selected
from tests.gpt2.attention.nsa.sizes import PAIR, drawn, full_attention, options


def test_the_formula_is_a_lower_triangle():
    """By hand: three tokens, whose keys are the logarithms of 1, 3 and 5."""
    q = torch.ones(1, 1, 3, 1, dtype=torch.float64)
    k = torch.tensor([0.0, 2.0, 4.0], dtype=torch.float64).log1p().view(1, 1, 3, 1)
    v = torch.eye(3, dtype=torch.float64)[None, None]
    # Weights 1, 3 and 5, of which a row has the part up to its own.
    expected = torch.tensor([[1, 0, 0], [1 / 4, 3 / 4, 0], [1 / 9, 3 / 9, 5 / 9]])
    found = full_attention(q, k, v)[0, 0]
    torch.testing.assert_close(found, expected.double(), atol=1e-7, rtol=0)
    uniform = full_attention(0 * q, k, v)[0, 0]
    rows = torch.ones(3, 3, dtype=torch.float64).tril()
    torch.testing.assert_close(uniform, rows / rows.sum(1, keepdim=True))


class TestFullAttention:
    """Each branch is full attention where it leaves nothing out."""

    # A branch, and sizes at which it sees everything.
    CASES = {
        "compressed": (0, {"compress": 1, "stride": 1, "select": 1, "phi": "mean"}),
        "selected": (1, {"count": 7}),
        "window": (2, {"window": 40}),
    }

    @pytest.mark.parametrize("name", CASES)
    def test_one_branch(self, build, branch, thin_rows, name):
        number, sizes = self.CASES[name]
        branch(number)
        case = build(40, projection=PAIR, pattern=options(shared_kv=True, **sizes))
        plain = build(40, projection=PAIR)
        plain.module.load_state_dict(case.module.state_dict(), strict=False)
        plain.x_BTC = case.x_BTC
        torch.testing.assert_close(case()[0], plain()[0], atol=1e-10, rtol=1e-10)

    def test_all_three(self, build):
        every = {name: size for _, sizes in self.CASES.values() for name, size in sizes.items()}
        pattern = options(**{**every, "count": 40}, shared_kv=True, gate="softmax")
        case, plain = build(40, projection=PAIR, pattern=pattern), build(40, projection=PAIR)
        plain.module.load_state_dict(case.module.state_dict(), strict=False)
        torch.testing.assert_close(
            case()[0], plain.module(case.x_BTC, plain.state)[0], atol=1e-10, rtol=1e-10
        )

    def test_queries_after_the_first_token(self):
        q, k, v = drawn(2, 2, 7, 2, 4), drawn(2, 2, 33, 4, seed=1), drawn(2, 2, 33, 4, seed=2)
        blocks = torch.arange(6).expand(2, 2, 7, 6).clone()
        # The first five tokens of them are of block 4, which does not see block 5.
        blocks[:, :, :4, 5] = -1
        found = attend_selected(q / 2, k, v, blocks, 6).transpose(2, 3).flatten(1, 2)
        expected = full_attention(q.transpose(2, 3).flatten(1, 2), k, v)
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-12)
