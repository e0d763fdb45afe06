"""GPT-2 assembled from embeddings, attention and MLP; independent of specific mechanisms.

Shapes: B batch, T tokens, C n_embd, V vocabulary, X = B·T.
"""

import math
from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt2.attention.attention import Attention
from gpt2.attention.projections import AdaptableLinear, ZeroInitLinear
from gpt2.attention.rows import ScoreChunks
from gpt2.attention.state import BlockState
from gpt2.attention.triton import TileLaunch
from gpt2.kv_cache import BlockKVCache, KVCache
from gpt2.loss import (
    LogitsChunks,
    TokenScores,
    fused_loss,
    linear_cross_entropy,
    linear_token_losses,
)
from gpt2.mlp.mlp import Mlp
from gpt2.mlp.options import LayerSpec
from gpt2.model_config import ModelConfig
from gpt2.norm import build_norm
from lib.pruning.layers import PaddedEmbedding, PaddedHead
from lib.runs.seeds import stream_seed

# GPT-2's standard deviation of initial weights (Radford et al. 2019).
INIT_STD = 0.02
_SCORES, _LOGITS = ScoreChunks(), LogitsChunks()


@dataclass(frozen=True)
class Execution:
    """Chunk sizes and kernels of a pass; the results of two executions differ in rounding only."""

    score_chunks: ScoreChunks = _SCORES
    logits_chunks: LogitsChunks = _LOGITS
    # Launch of the Triton kernels; None: on a GPU that supports them.
    tile_launch: TileLaunch | None = None


class Block(nn.Module):
    """Pre-norm transformer block: attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, site: LayerSpec) -> None:
        super().__init__()
        shape = config.shape
        self.ln_1 = build_norm(shape, config.norm)
        self.attn = Attention(shape, config.attention, config.mlp.request(site), site.block)
        self.ln_2 = build_norm(shape, config.norm)
        self.mlp = Mlp(site, config.mlp)

    def forward(
        self, x_BTC: Tensor, state: BlockState, cache: BlockKVCache | None = None
    ) -> tuple[Tensor, BlockState]:
        """Return the residual stream after the block and the state for the next block."""
        attended_BTC, view = self.attn(self.ln_1(x_BTC), state, cache)
        x_BTC = x_BTC + attended_BTC
        mixed_BTC, following = self.mlp(self.ln_2(x_BTC), view, cache)
        following.rotation, following.values_BKTH = state.rotation, view.values_BKTH
        return x_BTC + mixed_BTC, following


class GPT(nn.Module):
    """GPT-2: token and position embeddings, blocks, a final norm, and the output head.

    ``wpe`` is None if attention rotates queries and keys (rotary positions), ``lm_head`` if the head
    is tied to ``wte``. Both have ``padded_vocab_size`` rows; rows from ``vocab_size`` on are padding
    and affect neither loss nor gradients.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # May be changed between steps: gradients are bit-identical either way.
        self.grad_checkpointing = config.grad_checkpointing
        shape = config.shape
        self.wte = PaddedEmbedding(shape.padded_vocab_size, shape.n_embd, shape.vocab_size)
        rotates = config.attention.positions.rotates
        self.wpe = None if rotates else nn.Embedding(shape.block_size, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)
        self.h = nn.ModuleList(Block(config, site) for site in config.sites())
        self.ln_f = build_norm(shape, config.norm)
        rows = shape.padded_vocab_size, shape.vocab_size
        self.lm_head = PaddedHead(shape.n_embd, *rows) if config.untied_head else None
        self.execution = Execution()
        for options in config.adapters:
            # An export has no adapters, and not this module.
            from gpt2.lora import Adapter

            Adapter.add_to(self, self.blocks, options)

    @property
    def blocks(self) -> list[Block]:
        """Return the blocks in order."""
        return cast(list[Block], list(self.h))

    @property
    def head(self) -> Tensor:
        """Return the matrix of the output head: a row for each row of ``wte``, and C columns."""
        return self.wte.weight if self.lm_head is None else self.lm_head.weight

    def set_execution(self, execution: Execution) -> None:
        """Use the chunk sizes and kernels of ``execution`` from the next forward pass on."""
        self.execution = execution
        for block in self.blocks:
            block.attn.set_execution(execution.score_chunks, execution.tile_launch)

    def forward(self, idx_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return logits [B, T, vocab_size], or the loss of training if targets are given.

        It is the mean cross-entropy in nats, with the configured z-loss. Targets of −100 are ignored.
        ``idx_BT`` contains at most ``block_size`` tokens per row.
        """
        x_BTC = self.hidden(idx_BT)
        if targets_BT is None:
            return self.logits(x_BTC)
        return linear_cross_entropy(
            x_BTC.flatten(0, 1),
            self.head,
            targets_BT.flatten(),
            self.config.shape.vocab_size,
            self.execution.logits_chunks,
            fused_loss(self.config.loss_backend, x_BTC.device),
            self.config.z_loss,
        )

    def new_cache(self) -> KVCache:
        """Return an empty KV cache for new sequences."""
        return KVCache([block.attn.new_cache() for block in self.blocks])

    @torch.no_grad()
    def decode(self, idx_BT: Tensor, cache: KVCache) -> Tensor:
        """Return logits [B, T, vocab_size] for T ≥ 1 tokens that follow the tokens in ``cache``.

        The result equals ``forward`` on the whole sequence. The tokens are appended to ``cache``; a
        row has at most ``block_size`` tokens including the cached ones.
        """
        assert not self.training, "decode() requires evaluation mode"
        return self.logits(self.hidden(idx_BT, cache))

    def hidden(self, idx_BT: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the input of the head: the residual stream after the final norm, [B, T, C]."""
        return self.transform(self.wte(idx_BT), cache)

    def transform(self, x_BTC: Tensor, cache: KVCache | None = None) -> Tensor:
        """Return the input of the head for embeddings of tokens without their positions."""
        count = x_BTC.size(1)
        first = 0 if cache is None else cache.position
        last = first + count
        assert last <= self.config.shape.block_size, f"{last} tokens exceed the context"
        if self.wpe is not None:
            x_BTC = x_BTC + self.wpe.weight[first:last]
        x_BTC = self.dropout(x_BTC)
        state = BlockState(rotation=self.blocks[0].attn.positions.rotation(x_BTC, count, first))
        caches = [None] * len(self.h) if cache is None else cache.blocks
        recompute = self.grad_checkpointing and torch.is_grad_enabled()
        for block, block_cache in zip(self.h, caches, strict=True):
            if recompute:
                # checkpoint() restores the RNG state, so the recomputed dropout mask is the same.
                x_BTC, state = checkpoint(block, x_BTC, state, use_reentrant=False)
            else:
                x_BTC, state = block(x_BTC, state, block_cache)
        if cache is not None:
            cache.advance(count)
        return self.ln_f(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """Return the logits for the output of ``hidden`` or for some of its positions."""
        return F.linear(x_BTC, self.head)[..., : self.config.shape.vocab_size]

    @torch.no_grad()
    def token_losses(self, idx_BT: Tensor, targets_BT: Tensor) -> TokenScores:
        """Return loss, correctness and confidence of each target, [B, T]."""
        x_BTC = self.hidden(idx_BT)
        scores_X = linear_token_losses(
            x_BTC.flatten(0, 1),
            self.head,
            targets_BT.flatten(),
            self.config.shape.vocab_size,
            self.execution.logits_chunks,
        )
        return TokenScores(*(scores.view_as(targets_BT) for scores in scores_X))

    @torch.no_grad()
    def init_weights(self, seed: int, stream: int = 0) -> None:
        """Initialize every matrix from a separate RNG stream derived from ``seed`` and its name.

        Another ``stream`` (INIT_STREAM) gives other values for the same seed.

        Parameters with the same name and shape get the same values in every variant of a study and
        on every device.

        matrices                            N(0, 0.02)
        ``c_proj`` (to the residual stream) N(0, 0.02 / √(2·n_layer))
        linear and norm biases, padding     0
        weights of a ``ZeroInitLinear``         0
        norm weights                        1
        constants of mechanisms             as set by their constructors
        """
        zeros = {m.weight for m in self.modules() if isinstance(m, ZeroInitLinear)}
        residual_std = INIT_STD / math.sqrt(2 * self.config.shape.n_layer)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm | nn.RMSNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        for name, parameter in self.named_parameters():
            if parameter in zeros:
                parameter.zero_()
            if parameter.ndim < 2 or parameter in zeros:
                continue
            std = residual_std if name.endswith("c_proj.weight") else INIT_STD
            purpose = initial_weights_stream(name, stream)
            generator = torch.Generator().manual_seed(stream_seed(seed, purpose))
            rows: Tensor = parameter
            if parameter is self.wte.weight or parameter is self.head:
                # Draw without the padding rows: token rows must not depend on vocab_multiple.
                parameter[self.config.shape.vocab_size :] = 0
                rows = parameter[: self.config.shape.vocab_size]
            rows.copy_(torch.empty(rows.shape).normal_(0, std, generator=generator))

    def num_params(self) -> int:
        """Return the number of parameters; a tied head is counted once."""
        return count_parameters(self)


def count_parameters(module: nn.Module) -> int:
    """Return the number of parameters, with the elements of matrices that are stored as codes."""
    stored = sum(parameter.numel() for parameter in module.parameters())
    layers = [part for part in module.modules() if isinstance(part, AdaptableLinear)]
    return stored + sum(layer.elements_in_codes for layer in layers)


def initial_weights_stream(parameter: str, number: int = 0) -> str:
    """Return the name of the stream of a parameter's initial weights.

    A ``number`` other than 0 selects other initial weights; no other stream depends on it.
    """
    return f"init-{number}/{parameter}" if number else f"init/{parameter}"
