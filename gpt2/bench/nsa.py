"""Native sparse attention beside full attention: whole sequences, and a token after a cache.

    python -m gpt2.bench.nsa LONGEST ROUNDS

prints JSON lines: the device and how many rows there will be, then each row when it is measured, one
for each setting, kind of work and length up to LONGEST tokens (four times as many for decoding); on
stderr how far it is. Attention alone, without projections: compression, scores, choice and
the three branches, against torch's own attention with keys that are repeated for the heads that share
them and with ``enable_gqa``. Sides take turns; a ratio is that of one round, to the faster full side.
On a CPU times are process CPU time of one thread, in fp32; on a GPU those of its events, in bf16.

B batch, T tokens (queries), S tokens, N heads, K key/value heads, H head dim.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
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
from lib.console import say
from lib.kconfig import Layer, Tree
from lib.units import clock

HEADS, KEY_HEADS, WIDTH = 12, 2, 64
SHORTEST = {"cpu": 512, "cuda": 8192}
# A token takes less than a clock tells: so many are timed at once.
_STEPS = 8
SETTINGS: dict[str, dict[str, Value]] = {
    "n=16, w=512": {},
    "n=8, w=256": {"NSA_SELECT_COUNT": 8, "NSA_WINDOW": 256},
}
# A line of progress comes this often, between rounds.
_SECONDS = 5.0
Side = Callable[[], object]


@dataclass(frozen=True)
class Job:
    """What one row is measured by."""

    setting: str
    work: str
    tokens: int

    @property
    def cost(self) -> int:
        """Of a round, roughly, in pairs of a whole sequence's forward pass."""
        if self.work == "decode":
            return 256 * self.tokens
        return self.tokens**2 * (1 if self.work == "forward" else 4)

    def __str__(self) -> str:
        return f"{self.setting}, {self.work}, {self.tokens:,} tokens"


class Progress:
    """Says how far the rounds of all jobs are, and how long the rest takes at this pace."""

    def __init__(self, jobs: list[Job], rounds: int) -> None:
        # One more warms up.
        self.rounds = 1 + rounds
        self.total = sum(job.cost for job in jobs) * self.rounds
        self.done = 0
        self.started = self.said = time.monotonic()

    def add(self, job: Job, count: int) -> None:
        """Round ``count`` of a job is over."""
        self.done += job.cost
        now = time.monotonic()
        if now - self.said < _SECONDS and self.done < self.total:
            return
        self.said = now
        left = (now - self.started) * (self.total / self.done - 1)
        part = f"{job}: {count} of {self.rounds} rounds"
        say("BENCH", f"{part}   {self.done / self.total:.0%}, eta {clock(left)}")


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


def jobs_of(longest: int, device: str) -> list[Job]:
    """Every setting and length, prefill first."""
    found = []
    for setting in SETTINGS:
        for works, most in (
            (("forward", "forward + backward"), longest),
            (("decode",), 4 * longest),
        ):
            tokens = SHORTEST[device]
            while tokens <= most:
                found += [Job(setting, work, tokens) for work in works]
                tokens *= 2
    return found


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


def timed(
    sides: Mapping[str, Side],
    rounds: int,
    device: str,
    tell: Callable[[int], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Seconds of each round, the sides in turn, after one round that warms up.

    ``tell`` is told how many rounds there were, after each.
    """
    found: dict[str, list[float]] = {name: [] for name in sides}
    for count in range(1 + rounds):
        for name, side in sides.items():
            seconds = _seconds(side, device)
            if count:
                found[name].append(seconds)
        tell(1 + count)
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


def measure(jobs: list[Job], rounds: int, device: str) -> Iterator[Row]:
    """A row for each job."""
    progress = Progress(jobs, rounds)
    for job in jobs:

        def tell(count: int, job: Job = job) -> None:
            progress.add(job, count)

        yield (_decoded if job.work == "decode" else _prefilled)(job, rounds, device, tell)


def _prefilled(job: Job, rounds: int, device: str, tell: Callable[[int], None]) -> Row:
    options, tokens = options_of(job.setting), job.tokens
    torch.manual_seed(0)
    sides = prefill(options, tokens, device)[job.work]
    # Without gradients nothing is kept.
    backward = job.work != "forward"
    saved = {name: saved_bytes(side) for name, side in sides.items()} if backward else {}
    counts = (tokens * (tokens + 1) // 2, sum(options.pairs(tokens)))
    times = timed(sides, rounds, device, tell)
    return _row(job.setting, job.work, tokens, times, counts, saved)


@torch.no_grad()
def _decoded(job: Job, rounds: int, device: str, tell: Callable[[int], None]) -> Row:
    torch.manual_seed(0)
    sides, cache = decode(options_of(job.setting), job.tokens, device)
    times = timed(sides, rounds, device, tell)
    steps = _STEPS * (1 + rounds)
    counts = (job.tokens + steps // 2, round(sum(cache.reads.values()) / steps))
    per_token = {name: [x / _STEPS for x in found] for name, found in times.items()}
    return _row(job.setting, job.work, job.tokens, per_token, counts, {})


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


def _write(document: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    # The reader writes each row down.
    sys.stdout.flush()


def main() -> int:
    """The command line."""
    longest, rounds = map(int, sys.argv[1:])
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs = jobs_of(longest, device)
    _write({"device": device, "rows": len(jobs)})
    for row in measure(jobs, rounds, device):
        _write(asdict(row))
    return 0


if __name__ == "__main__":
    cli.run(main)
