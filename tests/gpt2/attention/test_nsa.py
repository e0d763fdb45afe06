"""Native sparse attention: its definitions, what it sees, what it selects, what it costs."""

import itertools

import pytest
import torch

from gpt2.ablation.resolve import resolve_config
from gpt2.attention.grouped.options import GroupedOptions
from gpt2.attention.nsa import compressed, module
from gpt2.attention.nsa.blocks import score_blocks, select_blocks
from gpt2.attention.nsa.compress import compress
from gpt2.attention.nsa.compressed import attend_compressed
from gpt2.attention.nsa.options import NsaOptions
from gpt2.attention.nsa.reference import selected_blocks
from gpt2.attention.nsa.selected import attend_selected
from gpt2.attention.nsa.window import attend_window
from gpt2.model import GPT
from lib.errors import ConfigError
from lib.kconfig import Layer, Tree
from tests.gpt2.builders import make_model_config

PAIR = GroupedOptions(n_kv_head=2)
# Of 33 tokens six blocks, of which a query gets three that are forced and one by its score.
SIZES = {"compress": 4, "stride": 2, "select": 6, "count": 4, "window": 5}
FORM = {"shared_kv": False, "phi": "mlp", "hidden": 3, "gate": "sigmoid"}
BRANCHES = {f"branch_{name}": True for name in ("compressed", "selected", "window")}
FORM |= {"select_by": "score", **BRANCHES}
PAPER = {"compress": 32, "stride": 16, "select": 64, "count": 16, "window": 512}


def options(**given):
    return NsaOptions(**{**SIZES, **FORM, **given})


def drawn(*shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def full_attention(q_BNTH, k_BKSH, v_BKSH):
    """By its formula; the last query is that of the last token."""
    k, v = (x.repeat_interleave(q_BNTH.shape[1] // x.shape[1], 1) for x in (k_BKSH, v_BKSH))
    scores = torch.einsum("bnth,bnsh->bnts", q_BNTH, k) / q_BNTH.shape[-1] ** 0.5
    queries, tokens = scores.shape[-2:]
    later = torch.arange(tokens) > torch.arange(tokens - queries, tokens)[:, None]
    return torch.softmax(scores.masked_fill(later, -torch.inf), -1) @ v


@pytest.fixture
def thin_rows(monkeypatch, thin_chunks):
    """Chunks of eight rows in every branch."""
    monkeypatch.setattr(compressed, "CHUNK_ELEMENTS", 0)
    monkeypatch.setattr(compressed, "FEWEST_ROWS", 8)


@pytest.fixture
def branch(monkeypatch):
    """Makes one branch stand alone: gates of 1 and 0."""

    def only(number):
        def gated(branches, gates):
            return branches[number]

        monkeypatch.setattr(module, "combine", gated)

    return only


class TestAgainstReference:
    """Values and every gradient."""

    @pytest.mark.parametrize(
        "form", list(itertools.product([True, False], ["mean", "mlp"], ["sigmoid", "softmax"]))
    )
    def test_forms(self, build, thin_rows, form):
        shared, phi, gate = form
        pattern = options(shared_kv=shared, phi=phi, gate=gate)
        build(27, projection=PAIR, pattern=pattern).assert_equals_reference(1e-10)

    @pytest.mark.parametrize("key_heads", [1, 4])
    def test_key_heads(self, build, thin_rows, key_heads):
        case = build(20, projection=GroupedOptions(key_heads), pattern=options(), bias=False)
        case.assert_equals_reference(1e-10)

    @pytest.mark.parametrize("sizes", [(1, 1, 1), (2, 1, 3), (4, 4, 4), (6, 2, 6), (3, 3, 9)])
    @pytest.mark.parametrize("shared", [True, False])
    def test_sizes(self, build, thin_rows, sizes, shared):
        named = dict(zip(("compress", "stride", "select"), sizes))
        pattern = options(**named, shared_kv=shared, count=4)
        build(23, batch=1, projection=PAIR, pattern=pattern).assert_equals_reference(1e-10)

    # Around l = 4, l' = 6 and w = 5, and at none of their multiples.
    @pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 7, 13])
    def test_lengths(self, build, thin_rows, length):
        build(length, projection=PAIR, pattern=options()).assert_equals_reference(1e-10)

    def test_a_scale_of_heads_from_the_mlp(self, build):
        case = build(15, projection=PAIR, pattern=options(), handed_on=True)
        case.assert_equals_reference(1e-10)


class TestWhatIsSeen:
    """Exactly the tokens of the definition: no later one, and none fewer."""

    length = 33

    def seen(self, of_values):
        """For each query the tokens whose values its output depends on."""
        v = drawn(1, 2, self.length, 4, seed=3).requires_grad_()
        out_NTH = of_values(v)[0]
        found = []
        for t in range(self.length):
            (slope,) = torch.autograd.grad(out_NTH[0, t].sum(), v, retain_graph=True)
            found.append(slope[0, 0].abs().sum(-1).nonzero().flatten().tolist())
        return found

    def test_window(self):
        q, k = drawn(1, 4, self.length, 4), drawn(1, 2, self.length, 4, seed=1)
        found = self.seen(lambda v: attend_window(q, k, v, 5))
        assert found == [list(range(max(0, t - 4), t + 1)) for t in range(self.length)]

    def test_compressed(self):
        given = options(phi="mean", compress=4, stride=2)
        q, k = drawn(1, 2, 2, self.length, 4), drawn(1, 2, self.length, 4, seed=1)
        keys = compress(k, given, None)
        found = self.seen(
            lambda v: attend_compressed(q, keys, compress(v, given, None), given)[0].flatten(1, 2)
        )
        # Blocks end with token 3, 5, 7 …; the last one that t sees ends with t or before.
        assert found == [list(range((t + 1) // 2 * 2 if t >= 3 else 0)) for t in range(self.length)]

    def test_selected(self):
        given = options(phi="mean")
        q, k = drawn(1, 2, 2, self.length, 4), drawn(1, 2, self.length, 4, seed=1)
        keys = compress(k, given, None)
        blocks = attend_compressed(q, keys, keys, given)[1]
        chosen = [set(row) - {-1} for row in blocks[0, 0].tolist()]
        assert len(chosen[-1]) == 4 and len(set(map(frozenset, chosen[30:]))) > 1
        found = self.seen(
            lambda v: attend_selected(q.transpose(2, 3), k, v, blocks, given.select)
            .transpose(2, 3)
            .flatten(1, 2)
        )
        expected = [[s for s in range(t + 1) if s // 6 in row] for t, row in enumerate(chosen)]
        assert found == expected

    @pytest.mark.parametrize("token", [0, 3, 12, 31])
    def test_no_gradient_to_a_later_token(self, build, thin_rows, token):
        case = build(33, projection=PAIR, pattern=options())
        (found,) = torch.autograd.grad(case()[0][:, token].sum(), case.x_BTC)
        assert found[:, token + 1 :].count_nonzero() == 0
        assert found[:, token].count_nonzero() > 0

    @pytest.mark.parametrize("scale", [1.0, 8.0, 100.0])
    def test_later_tokens_change_neither_selection_nor_output(self, build, scale):
        case = build(49, projection=PAIR, pattern=options(), n_embd=32)
        changed = case.x_BTC.detach().clone()
        changed[:, 20:] = scale * drawn(*changed[:, 20:].shape, seed=5)
        before, after = ((case.module(x, case.state)[0][:, :20]) for x in (case.x_BTC, changed))
        torch.testing.assert_close(after, before, atol=1e-12, rtol=1e-12)
        q, k = drawn(1, 2, 2, 49, 4), drawn(1, 2, 49, 4, seed=1)
        lists = []
        for factor in (1.0, scale):
            k[:, :, 20:] = factor * drawn(1, 2, 29, 4, seed=int(factor))
            keys = compress(k, options(), None)
            lists.append(attend_compressed(q, keys, keys, options())[1][:, :, :20])
        assert torch.equal(*lists)

    def test_a_beginning_alone_gives_the_same(self, build):
        case = build(33, projection=PAIR, pattern=options())
        whole = case()[0]
        for stop in (1, 5, 6, 7, 18, 32):
            part = case.module(case.x_BTC[:, :stop], case.state)[0]
            torch.testing.assert_close(part, whole[:, :stop], atol=1e-12, rtol=1e-12)

    def test_sequences_of_a_batch_do_not_meet(self, build):
        case = build(33, batch=3, projection=PAIR, pattern=options())
        alone = case.module(case.x_BTC[1:2], case.state)[0]
        torch.testing.assert_close(alone[0], case()[0][1], atol=1e-12, rtol=1e-12)


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


class TestSelection:
    """Scores, forced blocks, ties."""

    @pytest.mark.parametrize(
        "sizes", [(32, 16, 64), (16, 8, 32), (32, 32, 64), (16, 16, 16), (6, 2, 8)]
    )
    def test_weights_count_as_far_as_they_overlap(self, sizes):
        compress_, stride, select = sizes
        given = options(compress=compress_, stride=stride, select=select)
        tokens = 5 * select
        count = given.compressed(tokens)
        alone = torch.eye(count, dtype=torch.float64)[None, None, None]
        found = score_blocks(alone, given, 5)[0, 0]
        for i, j in itertools.product(range(count), range(5)):
            low, high = max(i * stride, j * select), min(i * stride + compress_, (j + 1) * select)
            assert found[i, j] == max(0, high - low) / stride

    def test_weights_of_the_third_block(self):
        """Tokens 128 to 191, compressed blocks of 32 at every 16th token."""
        alone = torch.eye(19)[None, None, None]
        found = score_blocks(alone, options(**PAPER), 5)[0, 0, :, 2].tolist()
        assert found == [0] * 7 + [1, 2, 2, 2, 1] + [0] * 7

    def test_heads_of_a_group_are_summed_after_their_softmax(self):
        weights = drawn(1, 2, 3, 8, 9).softmax(-1)
        both = score_blocks(weights, options(), 4)
        each = sum(score_blocks(weights[:, :, g : g + 1], options(), 4) for g in range(3))
        torch.testing.assert_close(both, each)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_of_equal_scores_the_first(self, dtype):
        scores = torch.full((1, 1, 40, 10), 0.125, dtype=dtype)
        chosen = select_blocks(scores, options(select=4, count=5), 0)[0, 0].tolist()
        assert chosen[3] == [0, -1, -1, -1, -1] and chosen[13] == [0, 1, 2, 3, -1]
        assert chosen[39] == [0, 1, 2, 8, 9]

    def test_equals_a_search_from_the_definition(self):
        given = options(count=4)
        weights = drawn(1, 1, 1, 60, given.compressed(60), seed=4).softmax(-1)
        for t in range(60):
            weights[..., t, given.compressed(t + 1) :] = 0
        found = select_blocks(score_blocks(weights, given, 10), given, 0)[0, 0]
        for t, row in enumerate(found.tolist()):
            seen = weights[0, 0, 0, t, : given.compressed(t + 1)].tolist()
            expected = selected_blocks(t, seen, given)
            assert row == expected + [-1] * (4 - len(expected))
            assert len(expected) == min(4, t // 6 + 1)
            assert {0, t // 6, max(0, t // 6 - 1)} <= set(expected)

    def test_rows_from_a_later_token_on(self):
        scores = drawn(1, 2, 40, 7, seed=6).abs()
        whole = select_blocks(scores, options(), 0)
        assert torch.equal(select_blocks(scores[:, :, 17:], options(), 17), whole[:, :, 17:])

    def test_heads_in_another_order_select_the_same(self):
        q, keys = drawn(1, 2, 3, 33, 4), drawn(1, 2, 15, 4, seed=1)
        out, blocks = attend_compressed(q, keys, keys, options())
        turned, same = attend_compressed(q.flip(2), keys, keys, options())
        assert torch.equal(blocks, same)
        torch.testing.assert_close(turned, out.flip(2))
        q[:, 0, 1] *= 5
        assert torch.equal(attend_compressed(q, keys, keys, options())[1][:, 1], blocks[:, 1])


class TestDecoding:
    """A token after the other, and a prompt of any length first."""

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("prompt", [1, 3, 4, 5, 6, 7, 12, 13])
    def test_equals_the_forward_pass(self, build, shared, prompt):
        pattern = options(shared_kv=shared)
        case = build(20, projection=PAIR, pattern=pattern)
        whole, cache = case()[0], case.module.new_cache()
        found, width = [], 2 * 2 * 4
        for part in case.x_BTC.split([prompt] + [1] * (18 - prompt) + [2], 1):
            found.append(case.module(part, case.state, cache)[0])
            cache.position += part.shape[1]
            numbers = sum(x.nbytes for x in cache.kept.values()) / (2 * 8)
            assert numbers == case.options.cached_numbers(case.shape, cache.position)
        torch.testing.assert_close(torch.cat(found, 1), whole, atol=1e-11, rtol=1e-11)
        kept = {name: x.shape[2] for name, x in cache.kept.items()}
        own = {} if shared else {"raw": 4, "window": 5}
        assert kept == {
            f"{x}{rest and '_'}{rest}": length
            for x in "kv"
            for rest, length in {"": 20, "compressed": 9, **own}.items()
        }
        assert sum(kept.values()) * width / 2 == numbers


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

    def test_twice_the_same_bits(self, build):
        case = build(33, projection=PAIR, pattern=options(), dtype=torch.float32)
        first, second = case(), case()
        assert torch.equal(first[0], second[0])
        assert all(map(torch.equal, case.gradients(first), case.gradients(second)))

    def test_bfloat16_is_near(self, build):
        case = build(33, projection=PAIR, pattern=options(), dtype=torch.float32)
        with torch.no_grad():
            for parameter in case.module.parameters():
                parameter.mul_(0.3)
        exact = case()[0]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = case()[0]
        assert rough.isfinite().all() and rough.dtype == torch.bfloat16
        torch.testing.assert_close(
            rough.float(), exact, rtol=0, atol=0.02 * exact.abs().max().item()
        )

    def test_blocks_are_ranked_in_float32(self, monkeypatch):
        given = []
        monkeypatch.setattr(
            compressed, "score_blocks", lambda w, *rest: given.append(w) or score_blocks(w, *rest)
        )
        q, keys = drawn(1, 2, 3, 33, 4).bfloat16(), drawn(1, 2, 15, 4, seed=1).bfloat16()
        attend_compressed(q, keys, keys, options())
        sums = given[0][..., 3:, :].sum(-1)
        assert sums.dtype == torch.float32
        torch.testing.assert_close(sums, torch.ones_like(sums), rtol=0, atol=1e-6)


class TestConfiguration:
    """Sizes that do not go together, and what it does not go with."""

    @pytest.mark.parametrize(
        ("sizes", "message"),
        [
            ({"compress": 5}, "NSA_COMPRESS_BLOCK: 5 is not a multiple"),
            ({"select": 7}, "NSA_SELECT_BLOCK: 7 is not a multiple"),
            ({"compress": 8}, "NSA_COMPRESS_BLOCK: 8 is above NSA_SELECT_BLOCK=6"),
            ({"count": 2}, "NSA_SELECT_COUNT: 2 leaves no room"),
        ],
    )
    def test_sizes(self, sizes, message):
        with pytest.raises(ConfigError, match=message):
            options(**sizes)

    def layers(self, **symbols):
        chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
        return [Layer.of("command line", "test", {**chosen, **symbols})]

    def test_symbols(self):
        found = resolve_config(Tree(), self.layers(NSA_PHI_MEAN=True)).model.attention.pattern
        assert found == options(**PAPER, phi="mean", hidden=0)

    @pytest.mark.parametrize(
        "symbols",
        [
            {"RECIPROCAL": True},
            {"RA_CROSS_TOKEN": True},
            {"MLP_CROSS_TOKEN": True},
            {"ATTENTION_PROJECTION_GROUPED": False, "ATTENTION_PROJECTION_DENSE": True},
            {"DROPOUT": "0.1"},
            {"NSA_COMPRESS_BLOCK": 2048, "NSA_SELECT_BLOCK": 2048},
        ],
        ids=lambda given: next(reversed(given)),
    )
    def test_what_does_not_go_with_it(self, symbols):
        with pytest.raises(ConfigError, match=next(iter(symbols)).split("_PROJECTION")[0]):
            resolve_config(Tree(), self.layers(**symbols))

    @pytest.mark.parametrize("gate", ["sigmoid", "softmax"])
    def test_gates_start_at_a_third(self, gate):
        parts = {"nsa": {"gate": gate}}
        model = GPT(make_model_config("grouped", "nsa", parts=parts))
        model.init_weights(0)
        gates = model.h[1].attn.pattern.gates(torch.randn(2, 9, 32))
        assert gates.shape == (3, 2, 4, 9)
        torch.testing.assert_close(gates, torch.full_like(gates, 1 / 3))
