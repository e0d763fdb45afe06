"""Rotary positions: scores depend on distances, per head, with every attention backend."""

import pytest
import torch

from gpt2.attention.options import (
    AttentionWeightsOptions,
    DenseOptions,
    FullOptions,
    GroupedOptions,
    RaCrossTokenOptions,
    ReciprocalOptions,
    RopeOptions,
    SlidingOptions,
)
from gpt2.attention.positions import Rope
from gpt2.attention.reference import rope_rotate
from gpt2.attention.rows import ScoreChunks
from gpt2.model import GPT
from gpt2.shape import ModelShape
from gpt2.study.resolve import resolve_config
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from tests.gpt2.attention.conftest import build_case
from tests.gpt2.builders import SHAPE, make_model_config
from tests.gpt2.test_decode import CALLS, deviation

ROPE = RopeOptions(base=50.0)
TIGHT = 1e-10
SEEN = {"full": FullOptions(), "sliding": SlidingOptions(window=11)}
MADE = {"dense": DenseOptions(), "grouped": GroupedOptions(n_kv_head=2)}


@pytest.fixture
def rope():
    return Rope(ModelShape(**SHAPE), ROPE)


def random(*shape):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


class TestRotation:
    """The rotation alone."""

    def test_scores_of_every_head_depend_on_distances(self, rope):
        q, k = random(2, 3, 9, 8), random(2, 3, 9, 8).flip(2)
        near = rope(q) @ rope(k).mT
        far = rope(q, 1000) @ rope(k, 1000).mT
        torch.testing.assert_close(far, near, rtol=0, atol=1e-9)
        assert float((rope(q, 1000) @ rope(k).mT - near).abs().max()) > 0.1

    def test_equals_the_formula(self, rope):
        x = random(2, 3, 9, 8)
        torch.testing.assert_close(rope(x), rope_rotate(x, range(9), ROPE), rtol=0, atol=1e-13)
        places = range(7, 7 + 9 * 16, 16)
        torch.testing.assert_close(rope(x, 7, 16), rope_rotate(x, places, ROPE), rtol=0, atol=1e-12)
        # Written out for one pair of a head of 8: j = 1 turns by 50^(-1/4) for each token.
        angle = torch.tensor(3 * 50**-0.25, dtype=torch.float64)
        turned = x[0, 0, 3, 1] * angle.cos() - x[0, 0, 3, 5] * angle.sin()
        torch.testing.assert_close(rope(x)[0, 0, 3, 1], turned, rtol=0, atol=1e-13)

    @pytest.mark.parametrize("first", [0, 1_000_000])
    def test_narrow_types_are_rounded_once(self, rope, first):
        narrow = random(1, 2, 5, 8).bfloat16()
        exact = rope(narrow.double(), first)
        found = rope(narrow, first)
        assert found.dtype == torch.bfloat16
        # Half of the last of eight bits, and what fp32 leaves of two products that cancel.
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-6)


class TestAttention:
    """Values and gradients, against the reference."""

    @pytest.mark.parametrize(
        ("projection", "pattern", "backend"),
        [("dense", "full", "auto"), ("grouped", "sliding", "math"), ("grouped", "full", "rows")],
    )
    def test_every_form(self, projection, pattern, backend):
        made, seen = MADE[projection], SEEN[pattern]
        case = build_case(projection=made, pattern=seen, backend=backend, positions=ROPE)
        case.assert_equals_reference(TIGHT)

    @pytest.mark.parametrize(("apply", "mode"), [("output", "topk"), ("weights", "entropy")])
    def test_terms_gates_and_readers_of_weights(self, apply, mode):
        gate = {"alpha": 0.7, "topk": 5, "scale": 1.5, "bias": 0.2}
        gate |= {"head_average": False, "detach_stats": False}
        case = build_case(
            projection=MADE["grouped"],
            terms=(ReciprocalOptions(alpha=0.6, window=5, learnable=True),),
            gates=(RaCrossTokenOptions(mode, apply, **gate),),
            request=AttentionWeightsOptions("rms", topk=0, tau=0.8, detach=False),
            positions=ROPE,
            chunks=ScoreChunks(cpu_elements=0, min_rows=8),
        )
        case.assert_equals_reference(TIGHT)


class TestModel:
    """GPT without position embeddings."""

    def test_has_the_parameters_that_are_declared(self):
        learned, rope = (
            make_model_config("grouped", "sliding", positions=positions)
            for positions in ("learned", "rope")
        )
        model = GPT(rope)
        assert model.num_params() == rope.num_params() == learned.num_params() - 16 * 32
        assert set(model.state_dict()) == set(GPT(learned).state_dict()) - {"wpe.weight"}
        assert rope.flops_per_token() == learned.flops_per_token()

    @pytest.mark.parametrize("calls", CALLS, ids=str)
    @pytest.mark.parametrize(
        ("projection", "pattern", "terms"),
        [("dense", "sliding", ("reciprocal",)), ("grouped", "full", ())],
    )
    def test_decoding_equals_the_forward_pass(self, projection, pattern, terms, calls):
        parts = {"sliding": {"window": 4}, "reciprocal": {"window": 2}}
        config = make_model_config(projection, pattern, terms, positions="rope", parts=parts)
        assert deviation(config, calls) <= TIGHT


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"MODEL_SIZE_CUSTOM": True, "N_EMBD": 36, "N_HEAD": 4}, "POSITIONS_ROPE: .* 9"),
        ({"ATTENTION_PROJECTION_LATENT": True}, "POSITIONS_ROPE"),
        ({"ROPE_BASE": "1.5"}, r"ROPE_BASE: .*1\.5"),
    ],
)
def test_invalid_combinations_are_rejected(settings, problem):
    layer = ConfigLayer.of("defconfig", "test", {"POSITIONS_ROPE": True} | settings)
    with pytest.raises(ConfigError, match=problem):
        resolve_config(KconfigTree(), [layer])
