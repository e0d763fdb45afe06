"""One block of the step at its configured context, windows, counts and chunks, in float64.

B batch, T tokens (queries), S tokens (keys), C n_embd; r the rows that are compared.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gpt2.attention import reference
from gpt2.attention.attention import Attention
from gpt2.attention.rows import ScoreChunks
from gpt2.attention.state import BlockState
from gpt2.check.finding import CheckFinding
from gpt2.check.shrink import long_config
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.mlp.mlp import reference_request
from gpt2.model import GPT, Execution

_TOLERANCE = 1e-9
# Parts of the context, each of which has a compared row; not a divisor of block sizes.
_SPREAD = 7


def check_long(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare positions, and attention at selected rows, with the reference formulas."""
    config = long_config(subject.config)
    model = subject.build(config)
    height, shape = _chunk_rows(subject.config), config.model.shape
    length = shape.block_size
    chunks = ScoreChunks(cpu_elements=height * shape.n_head * length, min_rows=height)
    model.set_execution(Execution(score_chunks=chunks))
    ids = torch.from_numpy(subject.context.tokens.astype("int64"))
    idx_BT = ids.repeat(-(-length // len(ids)))[None, :length]
    embedded_BTC, input_BTC, out_BTC, weights_BTS = _forward(model, idx_BT)
    findings = _embeddings(model, idx_BT, embedded_BTC)
    parameters = dict(model.blocks[0].attn.named_parameters())
    rows = _rows(config, height)
    leaf_BTC = input_BTC.detach().requires_grad_()
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    expected_BrC, expected_BrS = reference.attention(
        leaf_BTC,
        leaves,
        shape.n_head,
        config.model.attention,
        reference_request(config.model.sites()[0], config.model.mlp),
        rows=rows,
    )
    out_BrC = out_BTC[:, rows]
    findings += _compare("attention output", out_BrC, expected_BrC, rows)
    actual, expected = [out_BrC], [expected_BrC]
    if weights_BTS is not None and expected_BrS is not None:
        what = "attention weights for the MLP"
        findings += _compare(what, weights_BTS[:, rows], expected_BrS, rows)
        actual.append(weights_BTS[:, rows])
        expected.append(expected_BrS)
    gradients = _gradients(actual, [input_BTC, *parameters.values()])
    by_formula = _gradients(expected, [leaf_BTC, *leaves.values()])
    return findings + _compare_gradients(["the input", *parameters], gradients, by_formula)


def _forward(model: GPT, idx_BT: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the input of the block, input and output of its attention, and the exposed weights."""
    seen: list[Tensor] = []
    shown: list[Tensor | None] = []

    def record(
        module: Attention, inputs: tuple[Tensor, BlockState], outputs: tuple[Tensor, object]
    ) -> None:
        seen.extend((inputs[0], outputs[0]))
        shown.append(outputs[1].weights_BTS)  # type: ignore[attr-defined]

    block = model.blocks[0]
    hooks = [
        block.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0])),
        block.attn.register_forward_hook(record),
    ]
    model.hidden(idx_BT)
    for hook in hooks:
        hook.remove()
    embedded_BTC, input_BTC, out_BTC = seen
    return embedded_BTC, input_BTC, out_BTC, shown[0]


def _gradients(outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the gradients of a random sum of ``outputs``, without those that are detached."""
    generator = torch.Generator().manual_seed(0)
    sums = [
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
        for x in outputs
        if x.requires_grad
    ]
    return torch.autograd.grad(torch.stack(sums).sum(), inputs, materialize_grads=True)


def _compare_gradients(
    names: Sequence[str], gradients: Sequence[Tensor], by_formula: Sequence[Tensor]
) -> list[CheckFinding]:
    """Return a finding for the first gradient that differs, relative to the largest of them."""
    # The gradient of queries is zero up to rounding if every row has a single key.
    largest = max(float(expected.abs().max()) for expected in by_formula)
    for name, actual, expected in zip(names, gradients, by_formula, strict=True):
        error = float((actual - expected).abs().max())
        if not error <= _TOLERANCE * largest:
            what = f"the gradient of {name} by the formulas, at the configured context"
            return [CheckFinding("long-gradient", what, f"differs by {error:.1e}")]
    return []


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
    rows = [length - 1, *(length * i // _SPREAD for i in range(1, _SPREAD))]
    windows = {
        int(value) for name, value in config.values.items() if name.endswith(("_WINDOW", "_TOPK"))
    }
    for window in sorted(windows, reverse=True):
        rows += [window - 1, window, window + 1]
    if not config.model.attention.pattern.attends:
        chunks = range(height, length, height)
        for first in {chunks[i] for i in (0, len(chunks) // 2, -1) if chunks}:
            rows += [first - 1, first]
    return sorted({row for row in rows if 0 <= row < length})


def _embeddings(model: GPT, idx_BT: Tensor, embedded_BTC: Tensor) -> list[CheckFinding]:
    """Compare the input of the block with token and position embeddings."""
    expected_BTC = model.wte.weight.detach()[idx_BT]
    if model.wpe is not None:
        expected_BTC = expected_BTC + model.wpe.weight.detach()[: idx_BT.shape[1]]
    return _compare("embeddings", embedded_BTC, expected_BTC, range(idx_BT.shape[1]))


def _compare(
    what: str, actual_BrX: Tensor, expected_BrX: Tensor, rows: Sequence[int]
) -> list[CheckFinding]:
    """Return a finding for the first row that differs."""
    error_r = (actual_BrX - expected_BrX).detach().abs().amax((0, 2))
    wrong = ~(error_r <= _TOLERANCE * expected_BrX.detach().abs().max())
    if not bool(wrong.any()):
        return []
    first = int(wrong.nonzero()[0])
    expected = f"{what} of token {rows[first]} of {rows[-1] + 1} by the formulas"
    return [CheckFinding("long-context", expected, f"differ by {float(error_r[first]):.1e}")]
