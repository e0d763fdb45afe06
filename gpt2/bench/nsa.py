"""Cases of sparse beside full attention: whole sequences and decoding from a cache, one sequence.

Attention alone, without projections: compression, scores, selection and branches, beside torch's, whose
heads share keys too.

B batch, T tokens (queries), S tokens, N heads, K key/value heads, H head dim.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.bench.timing import Case, Step
from gpt2.kv_cache import BlockKVCache
from gpt2.nsa.branches import attend_branches
from gpt2.nsa.cache import BranchKeyValues, KeyValue, NsaCache
from gpt2.nsa.module import compress_blocks
from gpt2.nsa.options import NsaOptions
from gpt2.study.resolve import resolve_config
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree

# Decoding steps that are timed together, since one step is shorter than the clock resolution.
_DECODE_STEPS = 8
SETTINGS: dict[str, dict[str, SymbolValue]] = {
    "n=16, w=512": {},
    "n=8, w=256": {"NSA_SELECT_COUNT": 8, "NSA_WINDOW": 256},
}


class Heads(NamedTuple):
    """Heads, key/value heads and head dim, on a device: in bf16 on a GPU, in fp32 on a CPU."""

    query: int
    key: int
    width: int
    device: torch.device

    def draw(self, heads: int, tokens: int) -> Tensor:
        """Return a random tensor BNTH with B = 1, ordered by token as projections return it."""
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        x_BTNH = torch.randn(1, tokens, heads, self.width, device=self.device, dtype=dtype)
        return x_BTNH.transpose(1, 2)

    def draw_keys(self, count: int, tokens: int) -> list[Tensor]:
        """Return random keys and values of ``count`` pairs."""
        return [self.draw(self.key, tokens) for _ in range(2 * count)]

    @property
    def calls(self) -> int:
        """Return the calls timed together: on a GPU several, as the layers of a training step.

        The host launches kernels of the next calls while those of the first run.
        """
        return 4 if self.device.type == "cuda" else 1


def nsa_options(**symbols: SymbolValue) -> NsaOptions:
    """Return the NSA options of the Kconfig defaults with the changes ``symbols``."""
    chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    layer = ConfigLayer.of("command line", "bench", {**chosen, **symbols, "DROPOUT": "0.0"})
    pattern = resolve_config(KconfigTree(), [layer]).model.attention.pattern
    assert isinstance(pattern, NsaOptions)
    return pattern


def nsa_attention(options: NsaOptions, q_BNTH: Tensor, *pairs: Tensor) -> Tensor:
    """Return the sum of the branch outputs; ``pairs`` are three pairs of k and v."""
    k_cmp, v_cmp, *rest = pairs
    blocks = (compress_blocks(k_cmp, options, None), compress_blocks(v_cmp, options, None))
    # A pair of a branch that is not built would be attended to all the same.
    keys = BranchKeyValues(
        blocks if options.compresses else None,
        (rest[0], rest[1]) if options.branch_selected else None,
        (rest[2], rest[3]) if options.branch_window else None,
    )
    first, *others = attend_branches(q_BNTH, keys, options, 0)
    return sum(others, first)


def full_attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, causal: bool = True
) -> Tensor:
    shared = k_BKSH.shape[1] < q_BNTH.shape[1]
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKSH, v_BKSH, is_causal=causal, enable_gqa=shared
    )


def prefill_cases(
    table: str, setting: str, options: NsaOptions, heads: Heads, tokens: int
) -> list[Case]:
    """Return the cases of a whole sequence, forward and with backward."""

    def side(attend: Callable[..., Tensor], pairs: int, backward: bool) -> Step:
        torch.manual_seed(0)
        drawn = heads.draw(heads.query, tokens), *heads.draw_keys(pairs, tokens)
        tensors = [x.requires_grad_(backward) for x in drawn]
        grad_output = torch.ones_like(tensors[0])

        def step() -> None:
            for _ in range(heads.calls):
                out = attend(*tensors)
                if backward:
                    torch.autograd.grad(out, tensors, grad_output, allow_unused=True)

        return step

    fewer = tokens * (tokens + 1) / 2 / sum(options.pairs(tokens))
    name = f"{setting}, {tokens:,} tokens, {fewer:.2f} times fewer pairs"
    cases = []
    for work, backward in (("forward", False), ("forward + backward", True)):
        sides = {
            "NSA": partial(side, partial(nsa_attention, options), 3, backward),
            "SDPA": partial(side, full_attention, 1, backward),
        }
        cases.append(Case(table, f"{name}, {work}", sides, heads.calls))
    return cases


def decode_case(table: str, setting: str, options: NsaOptions, heads: Heads, tokens: int) -> Case:
    """Return the case of decoding a token after ``tokens``."""

    def compressed(raw: dict[str, KeyValue]) -> tuple[Tensor, ...]:
        return tuple(compress_blocks(x, options, None) for x in raw["compressed"])

    def sparse_keys(cache: NsaCache, count: int) -> BranchKeyValues:
        k, v = heads.draw_keys(1, count)
        return cache.add(dict.fromkeys(options.branches, (k, v)), compressed)

    def full_keys(cache: BlockKVCache, count: int) -> list[Tensor]:
        new = zip("kv", heads.draw_keys(1, count), strict=True)
        return [cache.extend(name, x, dim=2) for name, x in new]

    def side(is_sparse: bool) -> Step:
        cache: Any = NsaCache(options, 0) if is_sparse else BlockKVCache(lambda row: 0)
        add: Callable[..., Any] = sparse_keys if is_sparse else full_keys
        add(cache, tokens)
        cache.position = tokens

        def step() -> None:
            for _ in range(_DECODE_STEPS):
                q_BNTH, keys = heads.draw(heads.query, 1), add(cache, 1)
                if is_sparse:
                    cache.attend(q_BNTH, keys)
                else:
                    full_attention(q_BNTH, *keys, causal=False)
                cache.position += 1

        return step

    sides = {"NSA": partial(side, True), "SDPA": partial(side, False)}
    return Case(table, f"{setting}, {tokens:,} tokens, decoding", sides, _DECODE_STEPS)


def nsa_cases(longest: int, device: torch.device) -> list[Case]:
    """Return the cases of every setting and length; decoding goes on to four times as many tokens."""
    heads, table = Heads(12, 2, 64, device), "12 heads of 64 over 2"
    cases = []
    for setting, symbols in SETTINGS.items():
        options, tokens = nsa_options(**symbols), 8192 if device.type == "cuda" else 512
        while tokens <= 4 * longest:
            if tokens <= longest:
                cases += prefill_cases(table, setting, options, heads, tokens)
            cases.append(decode_case(table, setting, options, heads, tokens))
            tokens *= 2
    return cases
