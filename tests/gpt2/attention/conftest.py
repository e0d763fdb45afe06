"""Attention modules built from options, and comparison with the reference."""

from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch import Tensor

from gpt2.attention import reference
from gpt2.attention.attention import Attention
from gpt2.attention.config import AttentionConfig
from gpt2.attention.options import (
    AttentionWeightsOptions,
    DenseOptions,
    FullOptions,
    LearnedOptions,
    RaCrossTokenOptions,
)
from gpt2.attention.rows import ScoreChunks
from gpt2.attention.state import BlockState
from gpt2.shape import ModelShape

# Chunks of eight rows, so that short sequences have several chunks.
THIN_CHUNKS = ScoreChunks(cpu_elements=0, min_rows=8)


@dataclass
class Case:
    """Attention module with all tensors it is differentiated with respect to."""

    module: Attention
    options: AttentionConfig
    shape: ModelShape
    request: AttentionWeightsOptions | None
    x_BTC: Tensor
    state: BlockState

    def __call__(self):
        out_BTC, view = self.module(self.x_BTC, self.state)
        return out_BTC, view.weights_BTS

    def reference(self):
        return reference.attention(
            self.x_BTC,
            dict(self.module.named_parameters()),
            self.shape.n_head,
            self.options,
            self.request,
            self.state.head_scale_BTN,
            self.state.latent_shift_BTR,
        )

    def leaves(self):
        given = {"x": self.x_BTC, **vars(self.state), **dict(self.module.named_parameters())}
        return {name: tensor for name, tensor in given.items() if tensor is not None}

    def gradients(self, made):
        """Return the gradients of a random combination of output and weights."""
        generator = torch.Generator().manual_seed(1)
        tensors = [t for t in made if t is not None and t.requires_grad]
        seeds = [torch.randn(t.shape, generator=generator).to(t.dtype) for t in tensors]
        leaves = list(self.leaves().values())
        # Inputs unused by the reference (sequences shorter than a block) have zero gradient.
        return torch.autograd.grad(tensors, leaves, seeds, materialize_grads=True)

    def assert_equals_reference(self, tolerance):
        fast, slow = self(), self.reference()
        close = dict(atol=tolerance, rtol=tolerance)
        torch.testing.assert_close(fast[0], slow[0], **close)
        if self.request:
            torch.testing.assert_close(fast[1], slow[1], **close)
        gradients = zip(self.leaves(), self.gradients(fast), self.gradients(slow), strict=True)
        for name, found, expected in gradients:
            torch.testing.assert_close(found, expected, **close, msg=lambda m: f"{name}: {m}")


def build_case(
    length=33,
    projection=DenseOptions(),
    pattern=FullOptions(),
    terms=(),
    gates=(),
    request=None,
    backend="auto",
    dtype=torch.float64,
    batch=2,
    handed_on=False,
    positions=LearnedOptions(),
    sinks=(),
    chunks=ScoreChunks(),
    **shape,
):
    """Build a case with large random parameters, so that no gradient is small."""
    torch.manual_seed(0)
    n_head, n_embd = shape.pop("n_head", 4), shape.pop("n_embd", 16)
    given = {"dropout": 0.0, "bias": True, **shape}
    sizes = ModelShape(2, n_head, n_embd, length, 64, vocab_size=50, **given)
    parts = (projection, pattern, positions, terms, gates)
    options = AttentionConfig(*parts, backend=backend, sinks=sinks)
    module = Attention(sizes, options, request)
    module.set_execution(chunks)
    if dtype != torch.get_default_dtype():
        module.to(dtype)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0, 0.6)
    x_BTC = torch.randn(batch, length, n_embd, dtype=dtype, requires_grad=True)
    state = BlockState()
    if handed_on:
        state.head_scale_BTN = torch.rand(batch, length, n_head, dtype=dtype, requires_grad=True)
    if handed_on and projection.name == "latent":
        width = projection.width(sizes)
        state.latent_shift_BTR = torch.randn(batch, length, width, dtype=dtype, requires_grad=True)
    return Case(module, options, sizes, request, x_BTC, state)


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture
def thin_chunks():
    """Make ``build`` use thin chunks."""


@pytest.fixture
def build(request):
    chunks = THIN_CHUNKS if "thin_chunks" in request.fixturenames else ScoreChunks()
    return partial(build_case, chunks=chunks)


@pytest.fixture
def gate():
    """Return a function that builds RA-CT options with a gate that has an effect."""

    def options(mode="topk", apply="output", **given):
        chosen = dict(alpha=0.7, topk=5, scale=1.5, bias=0.2, head_average=False)
        return RaCrossTokenOptions(mode, apply, **{**chosen, "detach_stats": False, **given})

    return options
