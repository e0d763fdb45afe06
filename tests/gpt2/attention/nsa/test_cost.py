"""What it costs: declared and built, counted and by formula."""

import pytest
import torch

from gpt2.attention.nsa import module
from gpt2.attention.nsa.compress import compress
from tests.gpt2.attention.nsa.sizes import PAIR, PAPER, options


class TestWhatItCosts:
    """Declared and built, counted and by formula."""

    @pytest.mark.parametrize("bias", [True, False])
    @pytest.mark.parametrize("phi", ["mean", "mlp"])
    @pytest.mark.parametrize("shared", [True, False])
    def test_declared_parameters_are_built(self, build, bias, phi, shared):
        pattern = options(phi=phi, shared_kv=shared)
        case = build(8, projection=PAIR, pattern=pattern, bias=bias, n_embd=48)
        parameters = list(case.module.parameters())
        assert sum(p.numel() for p in parameters) == case.options.num_params(case.shape)
        matrices = sum(p.numel() for p in parameters if p.ndim >= 2)
        assert matrices == case.options.weights(case.shape)

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 17, 18, 19, 60, 61])
    @pytest.mark.parametrize("sizes", [{}, {"count": 5}, {"compress": 6, "stride": 3}])
    def test_pairs_are_those_of_the_definition(self, length, sizes):
        given = options(**sizes)
        compressed_, selected, window = 0, 0, 0
        for t in range(length):
            if t + 1 >= given.compress:
                compressed_ += (t + 1 - given.compress) // given.stride + 1
            selected += (min(given.count, t // 6 + 1) - 1) * 6 + t % 6 + 1
            window += min(given.window, t + 1)
        assert given.pairs(length) == (compressed_, selected, window)
        assert given.mean_keys(length) == (compressed_ + selected + window) / length

    def test_the_papers_sizes_pay_from_some_thousand_tokens_on(self):
        given = options(**PAPER)
        ratios = {s: (s + 1) / 2 / given.mean_keys(s) for s in (1024, 4096, 8192, 65536)}
        rounded = {s: round(ratio, 2) for s, ratio in ratios.items()}
        assert rounded == {1024: 0.55, 4096: 1.38, 8192: 2.43, 65536: 9.25}

    def test_what_backward_needs_grows_with_the_length(self):
        def saved(length):
            total = 0

            def count(x):
                nonlocal total
                total += x.untyped_storage().nbytes()
                return x

            q = torch.randn(1, 4, length, 8, requires_grad=True)
            kv = [torch.randn(1, 2, length, 8, requires_grad=True) for _ in range(2)]
            small = tuple(compress(x, options(), None) for x in kv)
            keys = module.Keys(small, (kv[0], kv[1]), (kv[0], kv[1]))
            with torch.autograd.graph.saved_tensors_hooks(count, lambda x: x):
                module.attend_branches(q, keys, options(), 0)
            return total

        assert saved(512) / saved(256) <= 2.1
