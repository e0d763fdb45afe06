"""Native sparse attention beside full attention: whole sequences, and a token after a cache.

    python -m gpt2.bench.nsa LONGEST ROUNDS

prints a JSON list, one entry for each setting, kind of work and length up to LONGEST tokens (four
times as many for decoding). Attention alone, without projections: compression, scores, choice and
the three branches, against torch's own attention with keys that are repeated for the heads that share
them and with ``enable_gqa``. Sides take turns; a ratio is that of one round, to the faster full side.
On a CPU times are process CPU time of one thread, in fp32; on a GPU those of its events, in bf16.

B batch, T tokens (queries), S tokens, N heads, K key/value heads, H head dim.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.ablation.resolve import resolve_config
from gpt2.attention.nsa.cache import Keys, NsaCache, Pair
from gpt2.attention.nsa.compress import compress
from gpt2.attention.nsa.module import attend_branches
from gpt2.attention.nsa.options import NsaOptions
from gpt2.bench.nsa_table import Row
from gpt2.cache import BlockCache
from lib import cli
from lib.binding import Value
from lib.kconfig import Layer, Tree

HEADS, KEY_HEADS, WIDTH = 12, 2, 64
SHORTEST = {"cpu": 512, "cuda": 8192}
# A token takes less than a clock tells: so many are timed at once.
_STEPS = 8
SETTINGS: dict[str, dict[str, Value]] = {
    "n=16, w=512": {},
    "n=8, w=256": {"NSA_SELECT_COUNT": 8, "NSA_WINDOW": 256},
}
Side = Callable[[], object]


def options_of(setting: str) -> NsaOptions:
    """The symbols' defaults and what the setting changes."""
    chosen = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    layer = Layer.of("command line", "bench", {**chosen, **SETTINGS[setting], "DROPOUT": "0.0"})
    pattern = resolve_config(Tree(), [layer]).model.attention.pattern
    assert isinstance(pattern, NsaOptions)
    return pattern


def whole(options: NsaOptions, *given: Tensor) -> Tensor:
    """NSA's three outputs, added; ``given`` are q and three keys and values."""
    q_BNTH, k_cmp, v_cmp, *rest = given
    blocks = (compress(k_cmp, options, None), compress(v_cmp, options, None))
    keys = Keys(blocks, (rest[0], rest[1]), (rest[2], rest[3]))
    return torch.stack(attend_branches(q_BNTH, keys, options, 0)).sum(0)


def full(q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, causal: bool = True) -> Tensor:
    """Torch's own attention."""
    shared = k_BKSH.shape[1] < q_BNTH.shape[1]
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKSH, v_BKSH, is_causal=causal, enable_gqa=shared
    )


def drawn(heads: int, tokens: int, device: str) -> Tensor:
    """B = 1."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(1, heads, tokens, WIDTH, device=device, dtype=dtype)


def repeated(x_BKSH: Tensor) -> Tensor:
    """BNSH, in memory."""
    return x_BKSH.repeat_interleave(HEADS // KEY_HEADS, 1)


def prefill(options: NsaOptions, tokens: int, device: str) -> dict[str, dict[str, Side]]:
    """Kind of work → side → what it does."""
    q = drawn(HEADS, tokens, device)
    pairs = [drawn(KEY_HEADS, tokens, device) for _ in range(6)]
    k, v = pairs[2:4]
    sides: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "nsa": (lambda *given: whole(options, *given), [q, *pairs]),
        "expanded": (full, [q, repeated(k), repeated(v)]),
        "gqa": (full, [q, k, v]),
    }
    return {
        "forward": {name: _forward(*side) for name, side in sides.items()},
        "forward + backward": {name: _backward(*side) for name, side in sides.items()},
    }


def decode(options: NsaOptions, tokens: int, device: str) -> tuple[dict[str, Side], NsaCache]:
    """Side → a few more tokens after ``tokens``; and NSA's cache, which counts its reads."""
    sparse = NsaCache(options, 0)
    caches = {"expanded": BlockCache(lambda row: 0), "gqa": BlockCache(lambda row: 0)}

    def compressed(raw: dict[str, Pair]) -> tuple[Tensor, ...]:
        return tuple(compress(x, options, None) for x in raw["compressed"])

    def add(count: int) -> Keys:
        raw = {
            name: (drawn(KEY_HEADS, count, device), drawn(KEY_HEADS, count, device))
            for name in options.branches
        }
        return sparse.add(raw, compressed)

    def extended(name: str, count: int) -> list[Tensor]:
        new = [drawn(KEY_HEADS, count, device) for _ in "kv"]
        new = [repeated(x) for x in new] if name == "expanded" else new
        return [caches[name].extend(x, part, dim=2) for x, part in zip("kv", new)]

    def sparse_steps() -> None:
        for _ in range(_STEPS):
            sparse.attend(drawn(HEADS, 1, device), add(1))
            sparse.position += 1

    def full_steps(name: str) -> None:
        for _ in range(_STEPS):
            full(drawn(HEADS, 1, device), *extended(name, 1), causal=False)
            caches[name].position += 1

    add(tokens)
    sparse.position = tokens
    for name, cache in caches.items():
        extended(name, tokens)
        cache.position = tokens
    sides: dict[str, Side] = {"nsa": sparse_steps}
    sides |= {name: lambda name=name: full_steps(name) for name in caches}
    return sides, sparse


def timed(sides: Mapping[str, Side], rounds: int, device: str) -> dict[str, list[float]]:
    """Seconds of each round, the sides in turn, after one round that warms up."""
    found: dict[str, list[float]] = {name: [] for name in sides}
    for count in range(1 + rounds):
        for name, side in sides.items():
            seconds = _seconds(side, device)
            if count:
                found[name].append(seconds)
    return found


def saved_bytes(side: Side) -> int:
    """Of the tensors that backward keeps, each storage once."""
    storages: dict[int, int] = {}

    def keep(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        side()
    return sum(storages.values())


def measure(longest: int, rounds: int, device: str) -> list[Row]:
    """Every setting and length, prefill first."""
    rows = []
    for setting in SETTINGS:
        options, tokens = options_of(setting), SHORTEST[device]
        while tokens <= longest:
            torch.manual_seed(0)
            for work, sides in prefill(options, tokens, device).items():
                saved = {name: saved_bytes(side) for name, side in sides.items()}
                counts = (tokens * (tokens + 1) // 2, sum(options.pairs(tokens)))
                times = timed(sides, rounds, device)
                # Without gradients nothing is kept.
                kept = saved if work != "forward" else {}
                rows.append(_row(setting, work, tokens, times, counts, kept))
            tokens *= 2
        tokens = SHORTEST[device]
        while tokens <= 4 * longest:
            with torch.no_grad():
                sides, cache = decode(options, tokens, device)
                times = timed(sides, rounds, device)
            steps = _STEPS * (1 + rounds)
            counts = (tokens + steps // 2, round(sum(cache.reads.values()) / steps))
            per_token = {name: [x / _STEPS for x in found] for name, found in times.items()}
            rows.append(_row(setting, "decode", tokens, per_token, counts, {}))
            tokens *= 2
    return rows


def _row(
    setting: str,
    work: str,
    tokens: int,
    times: Mapping[str, list[float]],
    counts: tuple[int, int],
    saved: Mapping[str, int],
) -> Row:
    fastest = [min(pair) for pair in zip(times["expanded"], times["gqa"])]
    ratios = [a / b for a, b in zip(fastest, times["nsa"])]
    milliseconds = {name: 1000 * statistics.median(found) for name, found in times.items()}
    full_saved = min(saved["expanded"], saved["gqa"]) if saved else 0
    return Row(
        setting=setting,
        work=work,
        tokens=tokens,
        nsa_ms=milliseconds["nsa"],
        expanded_ms=milliseconds["expanded"],
        gqa_ms=milliseconds["gqa"],
        ratio=statistics.median(ratios),
        lowest=min(ratios),
        highest=max(ratios),
        full_keys=counts[0],
        nsa_keys=counts[1],
        full_saved_bytes=full_saved,
        nsa_saved_bytes=saved["nsa"] if saved else 0,
    )


def _forward(attend: Callable[..., Tensor], given: list[Tensor]) -> Side:
    def run() -> None:
        with torch.no_grad():
            attend(*given)

    return run


def _backward(attend: Callable[..., Tensor], given: list[Tensor]) -> Side:
    leaves = [x.detach().requires_grad_() for x in given]
    slope = torch.ones_like(given[0])

    def run() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, slope)

    return run


def _seconds(side: Side, device: str) -> float:
    if device == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        side()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000
    started = time.process_time()
    side()
    return time.process_time() - started


def main() -> int:
    """The command line."""
    longest, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows = measure(longest, rounds, device)
    document = {"device": device, "rows": [asdict(row) for row in rows]}
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    cli.run(main)
