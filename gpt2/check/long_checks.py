"""One block of the step at its configured context, windows, counts and chunks, in float64.

B batch, T tokens (queries), S tokens (keys), C n_embd; r the rows that are compared.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gpt2.attention import reference
from gpt2.attention.rows import ScoreChunks
from gpt2.check.finding import CheckFinding, within
from gpt2.check.shrink import long_config
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.mlp.mlp import reference_request
from gpt2.model import GPT, Execution
from gpt2.reference import with_adapters
from lib.optim.optimizers import trainable_parameters

_TOLERANCE = 1e-9
# Parts of the context, each of which has a compared row; not a divisor of block sizes.
_SPREAD = 7


def check_long(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare positions, and attention at selected rows, with the reference formulas."""
    config = long_config(subject.config)
    model, height, shape = subject.build(config), _chunk_rows(subject.config), config.model.shape
    length = shape.block_size
    chunks = ScoreChunks(cpu_elements=height * shape.n_head * length, min_rows=height)
    model.set_execution(Execution(score_chunks=chunks))
    ids = torch.from_numpy(subject.context.tokens)
    idx_BT = ids.repeat(-(-length // len(ids)))[None, :length]
    embedded_BTC, input_BTC, out_BTC, weights_BTS = _forward(model, idx_BT)
    embedding_BTC = model.wte.weight.detach()[idx_BT]
    if model.wpe is not None:
        embedding_BTC = embedding_BTC + model.wpe.weight.detach()[:length]
    findings = _compare("embeddings", embedded_BTC, embedding_BTC, range(length))
    parameters = {"the input": input_BTC, **trainable_parameters(model.blocks[0].attn)}
    rows = _rows(config, height)
    every = {"the input": input_BTC, **dict(model.blocks[0].attn.named_parameters())}
    leaves = {name: x.detach().requires_grad_() for name, x in every.items()}
    expected_BrC, expected_BrS = reference.attention(
        leaves["the input"],
        with_adapters(leaves, config.model),
        shape.n_head,
        config.model.attention,
        reference_request(config.model.sites()[0], config.model.mlp),
        rows=rows,
    )
    pairs = {"attention output": (out_BTC[:, rows], expected_BrC)}
    if weights_BTS is not None and expected_BrS is not None:
        pairs["attention weights for the MLP"] = weights_BTS[:, rows], expected_BrS
    for what, (actual, expected) in pairs.items():
        findings += _compare(what, actual, expected, rows)
    gradients, by_formula = (
        _gradients([pair[side] for pair in pairs.values()], [inputs[name] for name in parameters])
        for side, inputs in enumerate((parameters, leaves))
    )
    # The gradient of queries is zero up to rounding if every row has a single key.
    largest = max(float(expected.abs().max()) for expected in by_formula)
    differing = list[CheckFinding]()
    for name, actual, expected in zip(parameters, gradients, by_formula, strict=True):
        error = float((actual - expected).abs().max()) / largest
        what = f"the gradient of {name} by the formulas, at the configured context"
        differing += within("long-gradient", what, error, _TOLERANCE)
    return findings + differing[:1]


def _forward(model: GPT, idx_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the input of the block, input and output of its attention, and the exposed weights."""
    seen: list[Any] = []
    block = model.blocks[0]
    hooks = [
        # Frozen embeddings require no gradient.
        block.register_forward_pre_hook(lambda part, given: seen.append(given[0].requires_grad_())),
        block.attn.register_forward_hook(lambda module, given, out: seen.extend((given[0], *out))),
    ]
    model.hidden(idx_BT)
    for hook in hooks:
        hook.remove()
    embedded_BTC, input_BTC, out_BTC, view = seen
    return embedded_BTC, input_BTC, out_BTC, view.weights_BTS


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of a random sum of ``outputs``, without those that are detached."""
    generator = torch.Generator().manual_seed(0)
    sums = [
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
        for x in outputs
        if x.requires_grad
    ]
    return torch.autograd.grad(torch.stack(sums).sum(), inputs, materialize_grads=True)


def _chunk_rows(config: Config) -> int:
    """Return at most the rows of a chunk at the configured batch, heads and context.

    The number of chunks is odd and at least three, so that widths of chunks are not powers of two,
    which sorts of long rows would divide without a rest.
    """
    default, shape = ScoreChunks(), config.model.shape
    on_cpu = config.machine.device == "cpu"
    elements = default.cpu_elements if on_cpu else default.gpu_elements
    rows = elements // (config.train.batch_size * shape.n_head * shape.block_size)
    highest = max(default.min_rows, rows)
    return math.ceil(shape.block_size / max(3, math.ceil(shape.block_size / highest) | 1))


def _rows(config: Config, height: int) -> list[int]:
    """Return rows of the whole context, and those at the ends of windows and chunks."""
    length = config.model.shape.block_size
    rows = {length - 1, *(length * i // _SPREAD for i in range(1, _SPREAD))}
    for name, value in config.values.items():
        if name.endswith(("_WINDOW", "_TOPK")):
            rows |= {int(value) - 1, int(value), int(value) + 1}
    chunks = range(height, length, height)
    if chunks and not config.model.attention.pattern.attends:
        for first in (chunks[0], chunks[len(chunks) // 2], chunks[-1]):
            rows |= {first - 1, first}
    return sorted(row for row in rows if 0 <= row < length)


def _compare(
    what: str, actual_BrX: Tensor, expected_BrX: Tensor, rows: Sequence[int]
) -> list[CheckFinding]:
    """Return a finding for the first row that differs."""
    error_r = (actual_BrX - expected_BrX).detach().abs().amax((0, 2))
    error_r = error_r / expected_BrX.detach().abs().max()
    # NaN is no small error.
    wrong = (~(error_r <= _TOLERANCE)).nonzero()
    first = int(wrong[0]) if len(wrong) else 0
    expected = f"{what} of token {rows[first]} of {rows[-1] + 1} by the formulas"
    return within("long-context", expected, float(error_r[first]), _TOLERANCE)
