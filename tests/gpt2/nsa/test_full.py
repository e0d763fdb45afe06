"""Each branch equals full attention if it covers all tokens."""

import pytest
import torch

from tests.gpt2.nsa.sizes import PAIR, attended, drawn, full_attention


class TestFullAttention:
    """Branches with sizes that cover all tokens."""

    # Sizes at which a branch sees everything.
    CASES = {
        "compressed": {"compress": 1, "stride": 1, "select": 1},
        "selected": {"count": 7},
        "window": {"window": 40},
    }

    @pytest.mark.parametrize("queries", [40, 7])
    @pytest.mark.parametrize("name", CASES)
    def test_one_branch(self, thin_rows, nsa, name, queries):
        q, k, v = drawn(2, 4, queries, 4), drawn(2, 2, 40, 4, seed=1), drawn(2, 2, 40, 4, seed=2)
        found = attended(q, k, v, nsa(**self.CASES[name]))[name]
        torch.testing.assert_close(found, full_attention(q, k, v), atol=1e-12, rtol=1e-12)

    def test_all_three(self, build, thin_rows, nsa):
        """Check gates that sum to 1 over shared keys and values."""
        every = {name: size for sizes in self.CASES.values() for name, size in sizes.items()}
        pattern = nsa(**{**every, "count": 40}, phi="mean", shared_kv=True, gate="softmax")
        case, plain = build(40, projection=PAIR, pattern=pattern), build(40, projection=PAIR)
        plain.module.load_state_dict(case.module.state_dict(), strict=False)
        torch.testing.assert_close(
            case()[0], plain.module(case.x_BTC, plain.state)[0], atol=1e-10, rtol=1e-10
        )
