"""Rotary positions: a compressed key has the position of its block's first token."""

import pytest
import torch

from gpt2.attention.options import RopeOptions
from gpt2.attention.positions import Rope
from gpt2.check.subject import fill_parameters
from gpt2.model import GPT
from gpt2.nsa.branches import attend_branches
from gpt2.nsa.module import compress_blocks
from tests.gpt2.builders import make_model_config
from tests.gpt2.nsa.sizes import NAMES, PAIR, SIZES, drawn, every_form, options
from tests.gpt2.nsa.test_cache import LENGTH, PROMPTS, decoded
from tests.gpt2.test_decode import decoded as decoded_logits
from tests.gpt2.test_model import tokens

ROPE = RopeOptions(base=50.0)


def pattern_of(branches, kind, shared, **given):
    built = {f"branch_{name}": name in branches for name in NAMES}
    return options(**built, select_by=kind, shared_kv=shared, **given)


@pytest.fixture
def rotating(build):
    """Return a builder of attention with rotary positions."""

    def make(length=27, **given):
        return build(length, projection=PAIR, positions=ROPE, **given)

    return make


class TestAgainstReference:
    """Values and all gradients against a reference that rotates complex numbers."""

    @every_form
    def test_switches(self, rotating, thin_rows, branches, kind, shared):
        case = rotating(pattern=pattern_of(branches, kind, shared))
        case.assert_equals_reference(1e-10)

    @pytest.mark.parametrize("phi", ["mean", "mlp"])
    @pytest.mark.parametrize("backend", ["blocks", "gather"])
    def test_backends_and_compressions(self, rotating, backend, phi):
        case = rotating(pattern=options(backend=backend, phi=phi))
        case.assert_equals_reference(1e-10)

    @pytest.mark.parametrize("length", [1, 3, 4, 5, 6, 7, 13])
    def test_lengths(self, rotating, thin_rows, length):
        rotating(length, pattern=options()).assert_equals_reference(1e-10)


class TestPositions:
    """Position of every key."""

    def scored(self, case, shift):
        """Return queries and keys of a whole sequence, shifted by ``shift`` tokens."""
        pattern = case.module.pattern
        heads = case.module.c_attn(case.x_BTC, case.state)
        right = pattern.positions
        with pytest.MonkeyPatch.context() as patch:

            def later(x, first=0, step=1):
                return right(x, first + shift, step)

            patch.setattr(pattern, "positions", later)
            keys = pattern._keys(pattern._raw(case.x_BTC, heads))
            return pattern.positions(heads.q_BNTH), keys

    @pytest.mark.parametrize("shared", [True, False])
    def test_scores_of_every_branch_depend_on_distances(self, rotating, shared):
        case = rotating(pattern=options(shared_kv=shared))
        (q, keys), (q_later, keys_later) = (self.scored(case, shift) for shift in (0, 1000))
        assert float((q_later - q).detach().abs().max()) > 0.1
        for name in ("compressed_BKMH", "selected_BKSH", "window_BKSH"):
            k, k_later = (
                vars(found)[name][0].repeat_interleave(2, 1) for found in (keys, keys_later)
            )
            torch.testing.assert_close(q_later @ k_later.mT, q @ k.mT, rtol=0, atol=1e-9)
        values = [(vars(found)["selected_BKSH"][1]) for found in (keys, keys_later)]
        assert torch.equal(*values)

    @pytest.mark.parametrize("phi", ["mean", "mlp"])
    def test_a_compressed_key_stands_at_its_blocks_first_token(self, rotating, phi):
        case = rotating(pattern=options(phi=phi))
        pattern = case.module.pattern
        with torch.no_grad():
            heads = case.module.c_attn(case.x_BTC, case.state)
            raw = pattern._raw(case.x_BTC, heads)
            k_BKMH, v_BKMH = pattern._keys(raw).compressed_BKMH
            blocks = compress_blocks(raw["compressed"][0], pattern.options, pattern.phi_k)
        rope = Rope(case.shape, ROPE)
        for i in range(k_BKMH.shape[2]):
            one = rope(blocks[:, :, i : i + 1], i * SIZES["stride"])
            torch.testing.assert_close(k_BKMH[:, :, i : i + 1], one, rtol=0, atol=1e-12)
        assert torch.equal(
            v_BKMH, compress_blocks(raw["compressed"][1], pattern.options, pattern.phi_v)
        )

    def test_selection_is_that_of_rotated_scores(self, rotating):
        """Check that statistics rank with the same queries and keys as training."""
        case = rotating(pattern=options(phi="mean"))
        pattern = case.module.pattern
        seen = []
        right = attend_branches

        def note(q_BNTH, keys, *given):
            seen.append((q_BNTH, keys))
            return right(q_BNTH, keys, *given)

        told = []
        with pytest.MonkeyPatch.context() as patch, torch.no_grad():
            patch.setattr("gpt2.nsa.module.attend_branches", note)
            patch.setattr(
                "gpt2.nsa.module.selected_blocks",
                lambda q, keys, *given: told.append((q, keys)),
            )
            case()
            heads = case.module.c_attn(case.x_BTC, case.state)
            pattern.statistics(case.x_BTC, heads)
        ((q, keys),), ((its_q, its_keys),) = seen, told
        assert torch.equal(q, its_q)
        assert torch.equal(keys.compressed_BKMH[0], its_keys.compressed_BKMH[0])


class TestDecoding:
    """Decoding from cached rotated keys and unrotated keys of the incomplete block."""

    @pytest.mark.parametrize("shared", [True, False])
    @pytest.mark.parametrize("prompt", PROMPTS)
    def test_equals_the_forward_pass(self, rotating, shared, prompt):
        case = rotating(LENGTH, pattern=options(shared_kv=shared))
        found, *_ = decoded(case, [prompt, *[1] * (LENGTH - prompt - 2), 2])
        torch.testing.assert_close(found, case()[0], atol=1e-10, rtol=1e-10)

    @every_form
    def test_every_form_keeps_what_is_declared(self, rotating, branches, kind, shared):
        """Check the cache size; four of up to six blocks are selected, so ranking matters."""
        case = rotating(LENGTH, pattern=pattern_of(branches, kind, shared))
        cache, found = case.module.new_cache(), []
        for part_BTC in case.x_BTC.split([7] + [1] * (LENGTH - 9) + [2], 1):
            found.append(case.module(part_BTC, case.state, cache)[0])
            cache.position += part_BTC.shape[1]
            kept = sum(x.nbytes for x in cache.kept.values()) / (2 * 8)
            assert kept == case.options.cached_numbers(case.shape, cache.position)
        torch.testing.assert_close(torch.cat(found, 1), case()[0], atol=1e-11, rtol=1e-11)

    @pytest.mark.parametrize("shared", [True, False])
    def test_what_is_kept_does_not_depend_on_the_calls(self, rotating, shared):
        case = rotating(LENGTH, pattern=options(shared_kv=shared))
        _, stepwise, _ = decoded(case, [1] * LENGTH)
        assert ("k_raw" in stepwise.kept) and ("v_raw" in stepwise.kept) is not shared
        for prompt in (3, 7, 20, LENGTH):
            _, other, _ = decoded(case, [prompt, *[1] * (LENGTH - prompt)])
            assert other.kept.keys() == stepwise.kept.keys()
            for name, kept in stepwise.kept.items():
                torch.testing.assert_close(other.kept[name], kept, atol=1e-12, rtol=1e-12)

    @pytest.mark.parametrize("shared", [True, False])
    def test_a_token_reads_as_many_keys_as_without(self, rotating, build, shared):
        pattern = options(shared_kv=shared)
        counts = []
        for case in (
            rotating(LENGTH, pattern=pattern),
            build(LENGTH, projection=PAIR, pattern=pattern),
        ):
            counts.append(decoded(case, [7] + [1] * (LENGTH - 7))[1].reads)
        assert counts[0] == counts[1] and counts[0].total() > 0

    def test_a_long_context_keeps_one_block_more(self):
        """Check that a shared cache stores l additional unrotated keys."""
        with_, without = (
            make_model_config("grouped", "nsa", parts={"nsa": {"shared_kv": True}}, positions=name)
            for name in ("rope", "learned")
        )
        more = with_.cached_numbers(16) - without.cached_numbers(16)
        # Two layers, two key heads of 8 numbers, blocks of 2 tokens.
        assert more == 2 * 2 * 8 * 2


class TestModel:
    """Complete models."""

    @pytest.fixture(params=[True, False], ids=["shared", "own"])
    def model(self, request):
        parts = {"nsa": SIZES | {"shared_kv": request.param}}
        config = make_model_config(
            "grouped", "nsa", parts=parts, block_size=LENGTH, positions="rope"
        )
        model = GPT(config).double().eval()
        fill_parameters(model)
        return model

    def test_a_prefix_has_the_logits_of_the_whole(self, model):
        idx_BT = tokens(model.config, length=LENGTH)
        with torch.no_grad():
            whole = model(idx_BT)
            for length in (1, 5, 6, 7, 13, 33):
                found = model(idx_BT[:, :length])
                torch.testing.assert_close(found, whole[:, :length], rtol=0, atol=1e-11)

    def test_decoding_across_the_borders_of_blocks(self, model):
        idx_BT = tokens(model.config, length=LENGTH)
        with torch.no_grad():
            whole = model(idx_BT)
        for calls in ((1,) * LENGTH, (6, 6, 6, 16), (5, 2, *[1] * 10, 17)):
            found, _ = decoded_logits(model, idx_BT, calls)
            torch.testing.assert_close(found, whole, rtol=0, atol=1e-10)

    def test_narrow_types_train(self, model):
        """Check that every parameter has a gradient under bf16 autocast."""
        model = model.float().train()
        with torch.autocast("cpu", torch.bfloat16):
            idx_BT = tokens(model.config, length=LENGTH)
            model(idx_BT, idx_BT).backward()
        assert [n for n, p in model.named_parameters() if not p.grad.isfinite().all()] == []
        assert [n for n, p in model.named_parameters() if not p.grad.any()] == []


def test_heads_are_rotated_by_themselves():
    """Check that the rotation of a head is independent of other heads."""
    rope = Rope(make_model_config(positions="rope").shape, ROPE)
    x = drawn(2, 3, 9, 8)
    for n in range(3):
        torch.testing.assert_close(rope(x)[:, n : n + 1], rope(x[:, n : n + 1]), rtol=0, atol=0)
