"""Token cross-entropy of the output head that never materializes the logits of all tokens.

The loss of training has the z-loss beside it, c · log² Z with Z = Σ exp(logits), which evaluations
have not (Chowdhery et al. 2022, arXiv 2204.02311, section 5).

The GEMM of the head runs on chunks of tokens, the softmax on blocks of rows that fit into the CPU
cache. Training computes the gradients together with the loss while the logits of a chunk are in
memory: the logits are turned into their gradient p − onehot in place, so nothing of size tokens ×
vocabulary is stored. On a GPU, liger-kernel (Hsu et al. 2024, arXiv 2410.10989) does so in Triton.

Shapes: X tokens (batch and time flattened), C n_embd, V vocabulary (padded for weights).
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpt2.attention.triton import runs_tiles, tile_problem
from lib.errors import Problem, RunError

# Target value excluded from loss and accuracy, as in torch and transformers.
IGNORE_INDEX = -100
# Bytes of the logits of a chunk: enough rows for an efficient GEMM (1334 in bf16 at V = 50304).
CHUNK_BYTES = 2**27
# Elements of a block of rows: a softmax that fits into the CPU cache takes a third of the time.
BLOCK_ELEMENTS = 2**22


# Mean loss over the targets X that are not ignored, of hidden states XC, a weight VC, the number of
# its rows that are tokens, and the coefficient of the z-loss.
FusedLoss = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]


def fused_loss(backend: str, device: torch.device) -> FusedLoss | None:
    """Return liger-kernel's loss if ``backend`` (auto, torch, triton) selects it; None: torch's
    operations, as in a compiled model. Raises RunError if the kernel is named and cannot run.
    """
    if torch.compiler.is_compiling() or backend == "torch":
        return None
    missing = importlib.util.find_spec("liger_kernel") is None
    if backend == "auto" and (missing or not runs_tiles(device)):
        return None
    if problem := tile_problem(torch.float32, device):
        raise RunError(
            replace(problem, where="LOSS_BACKEND", next="type: SET=LOSS_BACKEND_TORCH=y")
        )
    if missing:
        what, fix = "liger-kernel: the package is missing", "type: make setup EXTRAS=liger"
        fix = f"{fix}, or SET=LOSS_BACKEND_TORCH=y"
        raise RunError(Problem(what, "LOSS_BACKEND", fix, code="env.missing-package"))
    return _liger_loss


def _liger_loss(
    hidden_XC: Tensor, weight_VC: Tensor, targets_X: Tensor, vocab_size: int, z_loss: float
) -> Tensor:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    dtype = _gemm_dtype(hidden_XC)
    # A weight that is cut at the vocabulary has rows of logits without alignment, on which the three
    # products of an H200 took four times as long.
    bias_V = weight_VC.new_zeros(len(weight_VC), dtype=dtype)
    # The exponential of its distance to any other logit is 0.
    bias_V[vocab_size:] = torch.finfo(dtype).min / 2
    outputs = LigerFusedLinearCrossEntropyFunction.apply(
        *(hidden_XC.to(dtype), weight_VC.to(dtype), targets_X),
        *(bias_V, None, IGNORE_INDEX, z_loss, 0.0, "mean", None, False),
        # Of the sum of the weight's gradient over chunks of tokens.
        torch.float32,
    )
    loss: Tensor = outputs[0]
    return loss


@dataclass(frozen=True)
class LogitsChunks:
    """Division of the tokens into chunks of one GEMM, and of a chunk into blocks of one softmax."""

    chunk_bytes: int = CHUNK_BYTES
    block_elements: int = BLOCK_ELEMENTS

    def chunks(self, hidden_XC: Tensor, weight_VC: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield row slices and their logits in chunks of equal size; all chunks share a buffer."""
        tokens, vocab = len(hidden_XC), len(weight_VC)
        chunks = -(-tokens * vocab * hidden_XC.element_size() // self.chunk_bytes)
        size = -(-tokens // chunks)
        buffer_XV = hidden_XC.new_empty(size, vocab)
        for start in range(0, tokens, size):
            rows = slice(start, min(start + size, tokens))
            out = buffer_XV[: rows.stop - rows.start]
            yield rows, torch.mm(hidden_XC[rows], weight_VC.t(), out=out)

    def blocks(self, logits_XV: Tensor, *others: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Yield views of the same rows of all tensors, by block; on a GPU all rows at once."""
        rows, vocab = logits_XV.shape
        size = max(1, self.block_elements // vocab) if logits_XV.is_cpu else rows
        return zip(*(tensor.split(size) for tensor in (logits_XV, *others)), strict=True)


class TokenScores(NamedTuple):
    """Loss, correctness and confidence per target (0, False, 0 for ignored targets)."""

    # Cross-entropy in nats.
    loss: Tensor
    # Whether the target has the largest logit.
    correct: Tensor
    # Probability of the largest logit.
    confidence: Tensor


def linear_cross_entropy(
    hidden_XC: Tensor,
    weight_VC: Tensor,
    targets_X: Tensor,
    vocab_size: int,
    pieces: LogitsChunks = LogitsChunks(),
    fused: FusedLoss | None = None,
    z_loss: float = 0.0,
) -> Tensor:
    """Return the mean cross-entropy in nats of ``hidden @ weight.T`` over targets not ignored, and
    ``z_loss`` times the mean of log² Z, in fp32 or wider; NaN if all are ignored. Rows from
    ``vocab_size`` on are padding. Backward can run once. ``fused`` computes loss and gradients,
    except in float64.
    """
    if fused and hidden_XC.dtype != torch.float64 and torch.is_grad_enabled():
        return fused(hidden_XC, weight_VC, targets_X, vocab_size, z_loss)
    # Chunking does not help if the logits fit into one block; torch.compile fuses the plain form.
    if torch.compiler.is_compiling() and hidden_XC.is_cuda:
        return masked_cross_entropy(hidden_XC, weight_VC, targets_X, vocab_size, z_loss)
    if hidden_XC.size(0) * vocab_size <= pieces.block_elements or torch.compiler.is_compiling():
        logits_XV = F.linear(hidden_XC, weight_VC)[:, :vocab_size]
        return _loss_of_logits(_wide(logits_XV), targets_X, z_loss)
    # Evaluations, which need no gradients, have no z-loss.
    if torch.is_grad_enabled() or z_loss:
        loss: Tensor = _LinearCrossEntropy.apply(
            hidden_XC, weight_VC, targets_X, vocab_size, pieces, z_loss
        )
        return loss
    losses_X = linear_token_losses(hidden_XC, weight_VC, targets_X, vocab_size, pieces).loss
    return losses_X.sum() / (targets_X != IGNORE_INDEX).sum()


def masked_cross_entropy(
    hidden_XC: Tensor, weight_VC: Tensor, targets_X: Tensor, vocab_size: int, z_loss: float = 0.0
) -> Tensor:
    """Return the same loss over logits of which those of the padding are −∞: a GPU takes
    twice as long for rows that are cut at ``vocab_size``, whose starts are not aligned.
    """
    logits_XV = F.linear(hidden_XC, weight_VC)
    is_padding_V = torch.arange(len(weight_VC), device=hidden_XC.device) >= vocab_size
    masked_XV = _wide(logits_XV).masked_fill(is_padding_V, -torch.inf)
    return _loss_of_logits(masked_XV, targets_X, z_loss)


def _loss_of_logits(logits_XV: Tensor, targets_X: Tensor, z_loss: float) -> Tensor:
    loss = F.cross_entropy(logits_XV, targets_X, ignore_index=IGNORE_INDEX)
    if not z_loss:
        return loss
    valid_X = targets_X != IGNORE_INDEX
    return loss + z_loss * (logits_XV.logsumexp(-1).square() * valid_X).sum() / valid_X.sum()


@torch.no_grad()
def linear_token_losses(
    hidden_XC: Tensor,
    weight_VC: Tensor,
    targets_X: Tensor,
    vocab_size: int,
    pieces: LogitsChunks = LogitsChunks(),
) -> TokenScores:
    dtype = _gemm_dtype(hidden_XC)
    losses_X = hidden_XC.new_empty(len(targets_X), dtype=_wide_dtype(dtype))
    confidence_X = torch.empty_like(losses_X)
    correct_X = torch.empty_like(targets_X, dtype=torch.bool)
    columns_X = targets_X, losses_X, correct_X, confidence_X
    for rows, logits_XV in pieces.chunks(hidden_XC.to(dtype), weight_VC.to(dtype)):
        parts = logits_XV[:, :vocab_size], *(tensor[rows] for tensor in columns_X)
        for logits_, targets_, losses_, correct_, confidence_ in pieces.blocks(*parts):
            logits = _wide(logits_)
            losses_.copy_(
                F.cross_entropy(logits, targets_, ignore_index=IGNORE_INDEX, reduction="none")
            )
            largest, first = logits.max(-1)
            torch.eq(first, targets_, out=correct_)
            # log p of the largest logit = its margin over the target + log p of the target (−loss).
            margin = largest - logits.gather(1, targets_.clamp(min=0)[:, None])[:, 0]
            confidence_.copy_((margin - losses_).exp().clamp(max=1))
    return TokenScores(losses_X, correct_X, confidence_X.masked_fill_(targets_X == IGNORE_INDEX, 0))


class _LinearCrossEntropy(torch.autograd.Function):
    """Loss and gradients of the summed loss, computed in forward; backward only scales them."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_XC: Tensor,
        weight_VC: Tensor,
        targets_X: Tensor,
        vocab_size: int,
        pieces: LogitsChunks,
        z_loss: float,
    ) -> Tensor:
        dtype = _gemm_dtype(hidden_XC)
        valid_X = targets_X != IGNORE_INDEX
        hidden, weight = hidden_XC.to(dtype), weight_VC.to(dtype)
        # Mask the inputs instead of the logits, so ignored tokens contribute to neither gradient.
        masked = hidden * valid_X[:, None]
        losses_X = hidden.new_empty(len(targets_X), dtype=_wide_dtype(dtype))
        grad_hidden = torch.empty_like(hidden)
        grad_weight = None
        for rows, logits_XV in pieces.chunks(hidden, weight):
            parts = logits_XV[:, :vocab_size], targets_X[rows].clamp(min=0), losses_X[rows]
            _to_gradient_(*parts, pieces, z_loss)
            logits_XV[:, vocab_size:] = 0
            torch.mm(logits_XV, weight, out=grad_hidden[rows])
            # The head of a model with adapters is frozen.
            if not ctx.needs_input_grad[1]:
                continue
            if grad_weight is None:
                grad_weight = (logits_XV.t() @ masked[rows]).to(weight_VC.dtype)
            elif dtype == weight_VC.dtype:
                grad_weight.addmm_(logits_XV.t(), masked[rows])
            else:
                grad_weight += logits_XV.t() @ masked[rows]
        scale = valid_X.sum().to(losses_X.dtype).reciprocal()
        ctx.save_for_backward(grad_hidden.to(hidden_XC.dtype), grad_weight, valid_X, scale)
        return (losses_X * valid_X).sum() * scale

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, valid_X, scale = ctx.saved_tensors
        grad = grad * scale
        # In place: allocating a second tensor of the size of the weight costs more than scaling.
        grad_hidden.mul_((grad * valid_X)[:, None])
        grad_weight = None if grad_weight is None else grad_weight.mul_(grad)
        return grad_hidden, grad_weight, None, None, None, None


def _to_gradient_(
    logits_XV: Tensor, targets_X: Tensor, losses_X: Tensor, pieces: LogitsChunks, z_loss: float
) -> None:
    """Fill ``losses_X`` and replace logits by the gradient of the summed loss, p − onehot.

    That of c · log² Z is 2c log Z · p.
    """
    parts = logits_XV, targets_X[:, None], losses_X[:, None]
    for logits_, targets_, losses_ in pieces.blocks(*parts):
        logits = _wide(logits_)
        probabilities = torch.softmax(logits, -1)
        # −log p of the target without underflow of p: the largest probability is e^0 / Σ.
        largest = logits.amax(-1, keepdim=True)
        gap, log_share = largest - logits.gather(1, targets_), probabilities.amax(-1, True).log()
        losses_.copy_(gap - log_share)
        if z_loss:
            log_z = largest - log_share
            losses_.add_(z_loss * log_z.square())
            probabilities.mul_(1 + 2 * z_loss * log_z)
        probabilities.scatter_(1, targets_, probabilities.gather(1, targets_) - 1)
        logits_.copy_(probabilities)


def _gemm_dtype(hidden_XC: Tensor) -> torch.dtype:
    """Return the dtype autocast would use for a GEMM; float64 is never autocast."""
    device = hidden_XC.device.type
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    if autocast and hidden_XC.dtype != torch.float64:
        return torch.get_autocast_dtype(device)
    return hidden_XC.dtype


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _wide(logits_XV: Tensor) -> Tensor:
    return logits_XV.to(_wide_dtype(logits_XV.dtype))
