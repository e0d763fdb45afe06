"""Row engine: memory, dropout, ties, extreme scores and chunks."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from gpt2.attention.components import RowChunk, ScoreTerm, Window
from gpt2.attention.cross_token import RaCrossToken
from gpt2.attention.exposed import SORT_WIDTH, topk_values
from gpt2.attention.options import (
    AttentionWeightsOptions,
    ReciprocalOptions,
    SlidingOptions,
)
from gpt2.attention.rows import AttentionPlan, ScoreChunks, attend

TERM = ReciprocalOptions(alpha=0.6, window=20, learnable=True)
REQUEST = AttentionWeightsOptions("topk", topk=3, tau=0.0, detach=False)


class LargestTensor(TorchDispatchMode):
    """Records the elements of the largest tensor returned by an operation."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t.numel() for t in tree_leaves(out) if isinstance(t, torch.Tensor)]
        self.elements = max(self.elements, *made, 0)
        return out


@pytest.mark.parametrize(
    ("mode", "apply"),
    [("topk", "weights"), ("max", "output"), ("entropy", "weights"), ("rms", "output")],
)
def test_no_tensor_of_all_pairs(build, gate, mode, apply):
    length, heads, batch, rows = 256, 4, 4, 64
    case = build(length, terms=(TERM,), gates=(gate(mode, apply),), request=REQUEST, batch=batch)
    with LargestTensor() as largest_tensor:
        case.gradients(case())
    assert largest_tensor.elements <= batch * heads * rows * length


@pytest.mark.parametrize("apply", ["output", "weights"])
def test_saves_inputs_and_a_few_numbers_per_row(build, gate, apply):
    case = build(256, terms=(TERM,), gates=(gate("topk", apply),), request=REQUEST)
    heads = case.module.c_attn(case.x_BTC, case.state)
    parts = list(case.module.terms.values()), list(case.module.gates.values())
    plan = AttentionPlan(case.module.pattern, *parts, case.module.reader)
    saved = {}

    def pack(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        attend(heads.q_BNTH, heads.k_BKTH, heads.v_BKTH, plan)
    per_row = 2 * 4 * 256 * case.shape.n_head * 8
    assert sum(saved.values()) <= 3 * case.x_BTC.nbytes + per_row


def test_dropout_goes_on_from_the_global_generator(build):
    case = build(40, dropout=0.5, terms=(TERM,))
    torch.manual_seed(3)
    case()
    state = torch.get_rng_state()
    second, third = case()[0], case()[0]
    torch.set_rng_state(state)
    assert torch.equal(case()[0], second)
    assert not torch.equal(second, third)


def test_runs_on_shapes_alone(gate, build):
    parts = dict(terms=(TERM,), gates=(gate("topk", "weights"),), request=REQUEST)
    with FakeTensorMode():
        case = build(65, pattern=SlidingOptions(20), dropout=0.1, dtype=torch.float32, **parts)
        assert [g.shape for g in case.gradients(case())] == [
            t.shape for t in case.leaves().values()
        ]


def test_is_exact_under_autocast_for_inputs_that_are(build):
    case = build(40, terms=(TERM,), dtype=torch.float32)
    plan = AttentionPlan(case.module.pattern, list(case.module.terms.values()))
    qkv = [torch.randn(2, 4, 40, 4, requires_grad=True) for _ in "qkv"]
    found = []
    with torch.autocast("cpu", torch.bfloat16):
        for inputs in (qkv, [x.double() for x in qkv]):
            context = attend(*inputs, plan).context_BNTH
            found.append([context, *torch.autograd.grad(context.double().square().sum(), qkv)])
    for exact, expected in zip(*found, strict=True):
        torch.testing.assert_close(exact, expected.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("width", [1, 9, SORT_WIDTH - 1, SORT_WIDTH + 1, 3 * SORT_WIDTH + 7])
@pytest.mark.parametrize("k", [1, 8, 200])
def test_largest_are_those_of_a_sort(width, k):
    weights = torch.from_numpy(np.random.default_rng(0).random((2, 3, width)).round(2))
    found = topk_values(weights, k).sort(-1, descending=True).values
    assert torch.equal(found, weights.sort(-1, descending=True).values[..., :k])
    assert topk_values(weights.to("meta"), k).shape == found.shape


def test_equal_weights_count_once_each_and_share_the_slope(build, gate):
    weights = torch.tensor([0.3, 0.2, 0.2, 0.2, 0.1], dtype=torch.float64).reshape(1, 1, 1, 5)
    weights.requires_grad_()
    shape = build(5, n_head=1).shape
    for options, value, slope in (
        (gate(topk=2), 0.5, [1, 1 / 3, 1 / 3, 1 / 3, 0]),
        (gate(topk=3), 0.7, [1, 2 / 3, 2 / 3, 2 / 3, 0]),
        (gate(topk=9), 1.0, [1, 1, 1, 1, 1]),
        (gate("max"), 0.3, [1, 0, 0, 0, 0]),
    ):
        gate_of_row = RaCrossToken(shape, options)
        statistic = gate_of_row.statistic(weights, weights.log().detach(), RowChunk(4, 5, 0), {})
        assert statistic.item() == pytest.approx(value)
        (slopes,) = torch.autograd.grad(statistic, weights, torch.ones_like(statistic))
        assert slopes.flatten().tolist() == pytest.approx(slope)


def test_a_row_of_which_nothing_is_kept_is_zero(build):
    request = AttentionWeightsOptions("rms", topk=0, tau=10.0, detach=False)
    case = build(9, request=request)
    weights_BTS = case()[1]
    assert torch.equal(weights_BTS, torch.zeros_like(weights_BTS))
    assert all(g.isfinite().all() for g in case.gradients(case()))


def test_extreme_scores_stay_finite(build, gate):
    for mode in ("topk", "max", "entropy", "rms"):
        for apply in ("output", "weights"):
            chosen = gate(mode, apply, alpha=1.0, bias=-10.0, scale=-10.0)
            case = build(40, gates=(chosen,), request=REQUEST, dtype=torch.float32)
            with torch.no_grad():
                case.x_BTC.mul_(100)
            out, weights = case()
            assert out.isfinite().all() and weights.triu(1).count_nonzero() == 0
            assert all(g.isfinite().all() for g in case.gradients((out, weights)))


def test_a_closed_gate_spreads_attention_over_what_is_visible(build, gate, thin_chunks):
    request = AttentionWeightsOptions("none", topk=0, tau=0.0, detach=True)
    case = build(20, gates=(gate("max", "weights", alpha=1.0),), request=request)
    with torch.no_grad():
        case.module.gates["ra_cross_token"].bias.fill_(-1000.0)
    expected = torch.ones(20, 20, dtype=torch.float64).tril() / torch.arange(1, 21)[:, None]
    torch.testing.assert_close(case()[1], expected.expand(2, -1, -1))


@pytest.mark.parametrize("length", [1, 31, 33, 1024, 1025])
@pytest.mark.parametrize("highest", [32, 341])
def test_chunks_are_about_equally_high(length, highest):
    """Check 12 heads, batch 8 and 1024 tokens, once split into 3 × 341 rows and a single row."""
    q_BNTH = torch.empty(8, 12, length, 1, device="cpu")
    sizes = ScoreChunks(cpu_elements=highest * 8 * 12 * length)
    chunks = list(sizes.chunks(q_BNTH, lambda row: 0))
    heights = [chunk.height for chunk in chunks]
    assert sum(heights) == length and len(chunks) == -(-length // highest)
    assert max(heights) - min(heights) < len(chunks)


class Slopes(ScoreTerm):
    """Learnable slope per head, times the column: one value for all sequences and rows."""

    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.tensor([0.3, -0.2], dtype=torch.float64))

    def scores(self, rows, band, chunk, inputs):
        columns_c = torch.arange(chunk.left, chunk.last)
        return (inputs[0][:, None] * columns_c)[:, None]


def test_a_term_may_be_the_same_for_all_sequences_and_rows():
    q, k, v = torch.randn(3, 2, 2, 20, 4, dtype=torch.float64).unbind()
    term, given = Slopes(), ScoreChunks(cpu_elements=0, min_rows=8)
    context = attend(q, k, v, AttentionPlan(Window(None), [term], score_chunks=given)).context_BNTH
    (found,) = torch.autograd.grad(context.square().sum(), [term.slopes])
    added = (term.slopes[:, None] * torch.arange(20))[:, None]
    hidden = torch.ones(20, 20, dtype=torch.bool).triu(1)
    scores = (q @ k.mT / 2 + added).masked_fill(hidden, -torch.inf)
    expected = scores.softmax(-1) @ v
    torch.testing.assert_close(context, expected)
    (gradient,) = torch.autograd.grad(expected.square().sum(), [term.slopes])
    torch.testing.assert_close(found, gradient)
