"""GPT-2 from its parts; names no mechanism.

Shapes: B batch, T tokens, C n_embd, V vocabulary, X = B·T.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpt2.attention.base import Attention
from gpt2.attention.state import BlockState
from gpt2.cache import BlockCache, Cache
from gpt2.config import ModelConfig
from gpt2.loss import TokenScores, linear_cross_entropy, linear_token_losses
from gpt2.mlp.base import Mlp
from gpt2.mlp.options import BlockSite
from gpt2.zero_linear import ZeroLinear
from lib.pruning.mask import PaddedEmbedding
from lib.repro.streams import stream_seed

# GPT-2's standard deviation of initial weights (Radford et al. 2019).
INIT_STD = 0.02


class Block(nn.Module):
    """Pre-norm: attention and MLP, each added to the residual stream."""

    def __init__(self, config: ModelConfig, site: BlockSite) -> None:
        super().__init__()
        shape = config.shape
        mlp = Mlp(site, config.mlp)
        self.ln_1 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.attn = Attention(shape, config.attention, mlp.request, site.block)
        self.ln_2 = nn.LayerNorm(shape.n_embd, bias=shape.bias)
        self.mlp = mlp

    def forward(
        self, x_BTC: Tensor, state: BlockState, cache: BlockCache | None = None
    ) -> tuple[Tensor, BlockState]:
        """The residual stream after the block, and what the next block gets besides it."""
        attended_BTC, view = self.attn(self.ln_1(x_BTC), state, cache)
        x_BTC = x_BTC + attended_BTC
        mixed_BTC, state = self.mlp(self.ln_2(x_BTC), view, cache)
        return x_BTC + mixed_BTC, state


class GPT(nn.Module):
    """Token and position embeddings, blocks, a final norm, and a head tied to ``wte``.

    Without ``wpe`` where attention rotates queries and keys by their positions.

    ``wte`` has ``padded_vocab_size`` rows; rows from ``vocab_size`` on take no part in anything.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        # May be changed between two steps; gradients stay the same to the bit.
        self.grad_checkpointing = config.grad_checkpointing
        shape = config.shape
        self.wte = PaddedEmbedding(shape.padded_vocab_size, shape.n_embd, shape.vocab_size)
        rotates = config.attention.positions.rotates
        self.wpe = None if rotates else nn.Embedding(shape.block_size, shape.n_embd)
        self.dropout = nn.Dropout(shape.dropout)
        self.h = nn.ModuleList(Block(config, site) for site in config.sites())
        self.ln_f = nn.LayerNorm(shape.n_embd, bias=shape.bias)

    def forward(self, idx_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Logits [B, T, vocab_size], or with targets their mean cross-entropy in nats.

        A target of −100 is left out. ``idx`` holds at most ``block_size`` tokens a row.
        """
        x_BTC = self.hidden(idx_BT)
        if targets_BT is None:
            return self.logits(x_BTC)
        return linear_cross_entropy(
            x_BTC.flatten(0, 1), self.wte.weight, targets_BT.flatten(), self.config.shape.vocab_size
        )

    def new_cache(self) -> Cache:
        """The cache of sequences of which ``hidden`` has seen nothing yet."""
        return Cache([block.attn.new_cache() for block in self.h])

    @torch.no_grad()
    def decode(self, idx_BT: Tensor, cache: Cache) -> Tensor:
        """Logits [B, T, vocab_size] of ``forward``, for T ≥ 1 tokens after those in ``cache``.

        The tokens are added to it. With those before them they are at most ``block_size`` a row.
        """
        assert not self.training, "decoding is without dropout"
        return self.logits(self.hidden(idx_BT, cache))

    def hidden(self, idx_BT: Tensor, cache: Cache | None = None) -> Tensor:
        """What the head reads: the residual stream after the final norm [B, T, C]."""
        first = 0 if cache is None else cache.position
        last = first + idx_BT.size(1)
        assert last <= self.config.shape.block_size, f"{last} tokens exceed the context"
        x_BTC = self.wte(idx_BT)
        if self.wpe is not None:
            x_BTC = x_BTC + self.wpe.weight[first:last]
        x_BTC = self.dropout(x_BTC)
        state = BlockState()
        caches = [None] * len(self.h) if cache is None else cache.blocks
        again = self.grad_checkpointing and torch.is_grad_enabled()
        for block, kept in zip(self.h, caches, strict=True):
            if again:
                # Dropout is drawn anew from where the generators stood, as is its default.
                x_BTC, state = checkpoint(block, x_BTC, state, use_reentrant=False)
            else:
                x_BTC, state = block(x_BTC, state, kept)
        if cache is not None:
            cache.advance(idx_BT.size(1))
        return self.ln_f(x_BTC)

    def logits(self, x_BTC: Tensor) -> Tensor:
        """The head on what ``hidden`` gave, or on some of its positions."""
        return F.linear(x_BTC, self.wte.weight)[..., : self.config.shape.vocab_size]

    @torch.no_grad()
    def token_losses(self, idx_BT: Tensor, targets_BT: Tensor) -> TokenScores:
        """The scores of each target [B, T]."""
        x_BTC = self.hidden(idx_BT)
        scores_X = linear_token_losses(
            x_BTC.flatten(0, 1), self.wte.weight, targets_BT.flatten(), self.config.shape.vocab_size
        )
        return TokenScores(*(scores.view_as(targets_BT) for scores in scores_X))

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Draw every matrix from its own stream of ``seed``, keyed by its name.

        The same name and shape gives the same values in every variant of a study, on every device.

        matrices                            N(0, 0.02)
        ``c_proj`` (to the residual stream) N(0, 0.02 / √(2·n_layer))
        linear and norm biases, padding     0
        weights of a ``ZeroLinear``         0
        norm weights                        1
        constants of mechanisms             as their constructors set them
        """
        zeros = {m.weight for m in self.modules() if isinstance(m, ZeroLinear)}
        residual_std = INIT_STD / math.sqrt(2 * self.config.shape.n_layer)
        for module in self.modules():
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            elif isinstance(module, nn.Linear) and module.bias is not None:
                module.bias.zero_()
        for name, parameter in self.named_parameters():
            if parameter in zeros:
                parameter.zero_()
            if parameter.ndim < 2 or parameter in zeros:
                continue
            std = residual_std if name.endswith("c_proj.weight") else INIT_STD
            generator = torch.Generator().manual_seed(stream_seed(seed, f"init/{name}"))
            if parameter is self.wte.weight:
                # Padding is cut off first, so that it does not decide what the tokens' rows get.
                parameter[self.config.shape.vocab_size :] = 0
                parameter = parameter[: self.config.shape.vocab_size]
            parameter.copy_(torch.empty(parameter.shape).normal_(0, std, generator=generator))

    def num_params(self) -> int:
        """Built parameters; the head's, tied to ``wte``, are counted once."""
        return sum(parameter.numel() for parameter in self.parameters())
