"""Sparse beside full attention: whole sequences and cached decoding, as table, CSV file and figure.

    python -m gpt2.bench.nsa LONGEST ROUNDS table|json BUILD_DIR

Measures a row for each setting, kind of work and length up to LONGEST tokens (four times as many for
decoding), and writes each to the CSV file as soon as it is measured, also if Ctrl-C follows. Progress
goes to stderr. Only attention is timed, without projections: compression, scores, selection and the
three branches, against torch's attention with keys repeated for the heads that share them and with
``enable_gqa``. The sides take turns; a ratio compares times of the same round, against the faster
full side. CPU times are process CPU time of one thread, in fp32; GPU times are CUDA event times, in
bf16.

B batch, T tokens (queries), S tokens, N heads, K key/value heads, H head dim.
"""

import csv
import io
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.bench.runner import take_turns, within_rounds
from gpt2.kv_cache import BlockKVCache
from gpt2.nsa.branches import attend_branches
from gpt2.nsa.cache import BranchKeyValues, KeyValue, NsaCache
from gpt2.nsa.module import compress_blocks
from gpt2.nsa.options import NsaOptions
from gpt2.study.resolve import resolve_config
from lib import console
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.console import log
from lib.env.gpu import cpu_model
from lib.errors import EXIT_DONE, EXIT_INTERRUPTED
from lib.files import write_atomic
from lib.report.figures import load_pyplot
from lib.report.render import markdown_table
from lib.units import MIB, format_duration

NUM_HEADS, NUM_KEY_HEADS, HEAD_DIM = 12, 2, 64
MIN_TOKENS = {"cpu": 512, "cuda": 8192}
# Decoding steps that are timed together, since one step is shorter than the clock resolution.
_DECODE_STEPS = 8
SETTINGS: dict[str, dict[str, SymbolValue]] = {
    "n=16, w=512": {},
    "n=8, w=256": {"NSA_SELECT_COUNT": 8, "NSA_WINDOW": 256},
}
_PROGRESS_INTERVAL_SECONDS = 5.0
TimedFunction = Callable[[], object]


@dataclass(frozen=True)
class NsaBenchRow:
    """Timings of one kind of work at one length.

    Times are medians. ``ratio`` is the median of full / NSA over rounds, with the range ``lowest``
    to ``highest``. ``full_keys`` and ``nsa_keys`` are query-key pairs per head for whole sequences,
    and keys read per token for decoding.
    """

    setting: str
    work: str
    tokens: int
    nsa_ms: float
    expanded_ms: float
    gqa_ms: float
    ratio: float
    lowest: float
    highest: float
    full_keys: int
    nsa_keys: int
    full_saved_bytes: int
    nsa_saved_bytes: int

    @property
    def full_ms(self) -> float:
        """Return the milliseconds of the faster full side."""
        return min(self.expanded_ms, self.gqa_ms)

    @property
    def keys_ratio(self) -> float:
        """Return the ratio of keys, full / NSA."""
        return self.full_keys / self.nsa_keys


@dataclass(frozen=True)
class NsaBenchJob:
    """One row to measure: setting, kind of work and number of tokens."""

    setting: str
    work: str
    tokens: int

    @property
    def cost(self) -> int:
        """Return the rough cost of a round, in query-key pairs of a full forward pass."""
        if self.work == "decode":
            return 256 * self.tokens
        return self.tokens**2 * (1 if self.work == "forward" else 4)

    def __str__(self) -> str:
        return f"{self.setting}, {self.work}, {self.tokens:,} tokens"


class BenchProgress:
    """Progress over the rounds of all jobs, with the estimated remaining time."""

    def __init__(self, jobs: list[NsaBenchJob], rounds: int) -> None:
        # One additional warm-up round.
        self.rounds = 1 + rounds
        self.total = sum(job.cost for job in jobs) * self.rounds
        self.done = 0
        self.started = self.logged = time.monotonic()

    def add(self, job: NsaBenchJob, count: int) -> None:
        """Record that round ``count`` of a job has finished, and log the progress regularly."""
        self.done += job.cost
        now = time.monotonic()
        if now - self.logged < _PROGRESS_INTERVAL_SECONDS and self.done < self.total:
            return
        self.logged = now
        remaining = (now - self.started) * (self.total / self.done - 1)
        part = f"{job}: {count} of {self.rounds} rounds"
        log("BENCH", f"{part}   {self.done / self.total:.0%}, eta {format_duration(remaining)}")


def nsa_options(setting: str) -> NsaOptions:
    """Return the NSA options of a setting: the Kconfig defaults with the setting's changes."""
    symbols = {"ATTENTION_PROJECTION_GROUPED": True, "ATTENTION_PATTERN_NSA": True}
    layer = ConfigLayer.of(
        "command line", "bench", {**symbols, **SETTINGS[setting], "DROPOUT": "0.0"}
    )
    pattern = resolve_config(KconfigTree(), [layer]).model.attention.pattern
    assert isinstance(pattern, NsaOptions)
    return pattern


def nsa_attention(options: NsaOptions, *tensors: Tensor) -> Tensor:
    """Return the sum of the three branch outputs; ``tensors`` are q and three pairs of k and v."""
    q_BNTH, k_cmp, v_cmp, *rest = tensors
    blocks = (compress_blocks(k_cmp, options, None), compress_blocks(v_cmp, options, None))
    # A pair of a branch that is not built would be attended to all the same.
    keys = BranchKeyValues(
        blocks if options.compresses else None,
        (rest[0], rest[1]) if options.branch_selected else None,
        (rest[2], rest[3]) if options.branch_window else None,
    )
    return torch.stack(attend_branches(q_BNTH, keys, options, 0)).sum(0)


def full_attention(
    q_BNTH: Tensor, k_BKSH: Tensor, v_BKSH: Tensor, *, causal: bool = True
) -> Tensor:
    """Return torch's scaled dot-product attention."""
    shared = k_BKSH.shape[1] < q_BNTH.shape[1]
    return F.scaled_dot_product_attention(
        q_BNTH, k_BKSH, v_BKSH, is_causal=causal, enable_gqa=shared
    )


def random_tensor(heads: int, tokens: int, device: str) -> Tensor:
    """Return a random tensor BNTH with B = 1: bf16 on a GPU, fp32 on a CPU."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    return torch.randn(1, heads, tokens, HEAD_DIM, device=device, dtype=dtype)


def repeat_heads(x_BKSH: Tensor) -> Tensor:
    """Return keys or values repeated in memory for every query head, BNSH."""
    return x_BKSH.repeat_interleave(NUM_HEADS // NUM_KEY_HEADS, 1)


def bench_jobs(longest: int, device: str) -> list[NsaBenchJob]:
    """Return the jobs of every setting and length, whole sequences first."""
    jobs = []
    for setting in SETTINGS:
        for works, max_tokens in (
            (("forward", "forward + backward"), longest),
            (("decode",), 4 * longest),
        ):
            tokens = MIN_TOKENS[device]
            while tokens <= max_tokens:
                jobs += [NsaBenchJob(setting, work, tokens) for work in works]
                tokens *= 2
    return jobs


def prefill(options: NsaOptions, tokens: int, device: str) -> dict[str, dict[str, TimedFunction]]:
    """Return the timed functions of whole sequences: kind of work → side → function."""
    q = random_tensor(NUM_HEADS, tokens, device)
    pairs = [random_tensor(NUM_KEY_HEADS, tokens, device) for _ in range(6)]
    k, v = pairs[2:4]
    sides: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
        "nsa": (lambda *tensors: nsa_attention(options, *tensors), [q, *pairs]),
        "expanded": (full_attention, [q, repeat_heads(k), repeat_heads(v)]),
        "gqa": (full_attention, [q, k, v]),
    }
    return {
        "forward": {name: _forward(*side) for name, side in sides.items()},
        "forward + backward": {name: _backward(*side) for name, side in sides.items()},
    }


def decode(
    options: NsaOptions, tokens: int, device: str
) -> tuple[dict[str, TimedFunction], NsaCache]:
    """Return side → function that decodes a few tokens after ``tokens``, and the NSA cache.

    The NSA cache counts the keys that decoding reads.
    """
    sparse = NsaCache(options, 0)
    caches = {"expanded": BlockKVCache(lambda row: 0), "gqa": BlockKVCache(lambda row: 0)}

    def compressed(raw: dict[str, KeyValue]) -> tuple[Tensor, ...]:
        return tuple(compress_blocks(x, options, None) for x in raw["compressed"])

    def add(count: int) -> BranchKeyValues:
        raw = {
            name: (
                random_tensor(NUM_KEY_HEADS, count, device),
                random_tensor(NUM_KEY_HEADS, count, device),
            )
            for name in options.branches
        }
        return sparse.add(raw, compressed)

    def extended(name: str, count: int) -> tuple[Tensor, Tensor]:
        kv = [random_tensor(NUM_KEY_HEADS, count, device) for _ in "kv"]
        kv = [repeat_heads(x) for x in kv] if name == "expanded" else kv
        k, v = (caches[name].extend(x, new, dim=2) for x, new in zip("kv", kv, strict=True))
        return k, v

    def sparse_steps() -> None:
        for _ in range(_DECODE_STEPS):
            sparse.attend(random_tensor(NUM_HEADS, 1, device), add(1))
            sparse.position += 1

    def full_steps(name: str) -> None:
        for _ in range(_DECODE_STEPS):
            full_attention(random_tensor(NUM_HEADS, 1, device), *extended(name, 1), causal=False)
            caches[name].position += 1

    add(tokens)
    sparse.position = tokens
    for name, cache in caches.items():
        extended(name, tokens)
        cache.position = tokens
    sides: dict[str, TimedFunction] = {"nsa": sparse_steps}
    sides |= {name: partial(full_steps, name) for name in caches}
    return sides, sparse


def time_sides(
    sides: Mapping[str, TimedFunction],
    rounds: int,
    device: str,
    report: Callable[[int], None] = lambda _: None,
) -> dict[str, list[float]]:
    """Return the seconds of each round by side, after one warm-up round; the sides take turns.

    ``report`` is called after each round with the number of finished rounds.
    """
    times = take_turns(sides, 1 + rounds, lambda side: _seconds(side, device), report)
    return {name: seconds[1:] for name, seconds in times.items()}


def saved_bytes(side: TimedFunction) -> int:
    """Return the bytes of the tensors saved for backward, counting each storage once."""
    storages: dict[int, int] = {}

    def record(x: Tensor) -> Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(record, lambda x: x):
        side()
    return sum(storages.values())


def measure(jobs: list[NsaBenchJob], rounds: int, device: str) -> Iterator[NsaBenchRow]:
    """Measure the jobs in order and yield a row for each."""
    progress = BenchProgress(jobs, rounds)
    for job in jobs:

        def report(count: int, job: NsaBenchJob = job) -> None:
            progress.add(job, count)

        measure_job = _measure_decode if job.work == "decode" else _measure_prefill
        yield measure_job(job, rounds, device, report)


def _measure_prefill(
    job: NsaBenchJob, rounds: int, device: str, report: Callable[[int], None]
) -> NsaBenchRow:
    options, tokens = nsa_options(job.setting), job.tokens
    torch.manual_seed(0)
    sides = prefill(options, tokens, device)[job.work]
    # Without gradients nothing is saved.
    backward = job.work != "forward"
    saved = {name: saved_bytes(side) for name, side in sides.items()} if backward else {}
    counts = (tokens * (tokens + 1) // 2, sum(options.pairs(tokens)))
    times = time_sides(sides, rounds, device, report)
    return _row(job.setting, job.work, tokens, times, counts, saved)


@torch.no_grad()
def _measure_decode(
    job: NsaBenchJob, rounds: int, device: str, report: Callable[[int], None]
) -> NsaBenchRow:
    torch.manual_seed(0)
    sides, cache = decode(nsa_options(job.setting), job.tokens, device)
    times = time_sides(sides, rounds, device, report)
    steps = _DECODE_STEPS * (1 + rounds)
    counts = (job.tokens + steps // 2, round(sum(cache.reads.values()) / steps))
    per_token = {
        name: [x / _DECODE_STEPS for x in side_times] for name, side_times in times.items()
    }
    return _row(job.setting, job.work, job.tokens, per_token, counts, {})


def _row(
    setting: str,
    work: str,
    tokens: int,
    times: Mapping[str, list[float]],
    counts: tuple[int, int],
    saved: Mapping[str, int],
) -> NsaBenchRow:
    fastest = [min(pair) for pair in zip(times["expanded"], times["gqa"], strict=True)]
    ratios = within_rounds(fastest, times["nsa"])
    milliseconds = {name: 1000 * statistics.median(seconds) for name, seconds in times.items()}
    full_saved = min(saved["expanded"], saved["gqa"]) if saved else 0
    return NsaBenchRow(
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


def _forward(attend: Callable[..., Tensor], tensors: list[Tensor]) -> TimedFunction:
    def run() -> None:
        with torch.no_grad():
            attend(*tensors)

    return run


def _backward(attend: Callable[..., Tensor], tensors: list[Tensor]) -> TimedFunction:
    leaves = [x.detach().requires_grad_() for x in tensors]
    grad_output = torch.ones_like(tensors[0])

    def run() -> Any:
        return torch.autograd.grad(attend(*leaves), leaves, grad_output)

    return run


def _seconds(side: TimedFunction, device: str) -> float:
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


def to_markdown(rows: Sequence[NsaBenchRow]) -> str:
    """Return a Markdown table of all rows, and a table of the growth with length."""
    heads = ["setting", "work", "tokens", "NSA ms", "expanded ms", "enable_gqa ms"]
    heads += ["full / NSA", "keys, full / NSA", "saved MiB, full", "saved MiB, NSA"]
    cells = []
    for row in rows:
        saved = (row.full_saved_bytes, row.nsa_saved_bytes)
        cells.append(
            [
                row.setting,
                row.work,
                f"{row.tokens:,}",
                *(f"{ms:,.2f}" for ms in (row.nsa_ms, row.expanded_ms, row.gqa_ms)),
                f"{row.ratio:.2f} ({row.lowest:.2f} to {row.highest:.2f})",
                f"{row.keys_ratio:.2f}",
                *(f"{x / MIB:,.1f}" if x else "" for x in saved),
            ]
        )
    growth = _growth(rows)
    table = markdown_table(heads, cells, left=(0, 1))
    if not growth:
        return table
    heads = ["setting", "work", "tokens", "time NSA, times", "time full, times"]
    return table + "\n" + markdown_table(heads, growth, left=(0, 1))


def _growth(rows: Sequence[NsaBenchRow]) -> list[list[str]]:
    """Return the rows of a table of time growth for four times the tokens, as far as measured."""
    by_length = {(row.setting, row.work, row.tokens): row for row in rows}
    cells = []
    for (setting, work, tokens), row in by_length.items():
        longer = by_length.get((setting, work, 4 * tokens))
        if longer:
            growth = (longer.nsa_ms / row.nsa_ms, longer.full_ms / row.full_ms)
            cells.append(
                [setting, work, f"{tokens:,} to {4 * tokens:,}", *(f"{x:.1f}" for x in growth)]
            )
    return cells


def write_csv(rows: Sequence[NsaBenchRow], path: Path) -> None:
    """Write the rows as CSV, with the columns in field order."""
    text = io.StringIO()
    names = [field.name for field in fields(NsaBenchRow)]
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    write_atomic(path, text.getvalue())


def plot(rows: Sequence[NsaBenchRow], path: Path) -> None:
    """Plot the ratio full / NSA over tokens as PNG, with the ratio of keys as dashed lines.

    Requires matplotlib.
    """
    plots = load_pyplot()
    works = list(dict.fromkeys(row.work for row in rows))
    figure, axes = plots.subplots(1, len(works), figsize=(5 * len(works), 4), squeeze=False)
    for work, panel in zip(works, axes[0], strict=True):
        for setting in dict.fromkeys(row.setting for row in rows):
            series = [row for row in rows if (row.work, row.setting) == (work, setting)]
            tokens = [row.tokens for row in series]
            (line,) = panel.plot(tokens, [row.ratio for row in series], marker="o", label=setting)
            keys = [row.keys_ratio for row in series]
            panel.plot(tokens, keys, "--", color=line.get_color(), label=f"{setting}, keys")
        panel.axhline(1, color="black", linewidth=0.5)
        panel.set(title=work, xlabel="tokens", ylabel="full / NSA")
        panel.set_xscale("log", base=2)
        panel.set_yscale("log", base=2)
        panel.xaxis.set_major_formatter("{x:,.0f}")
        panel.yaxis.set_major_formatter("{x:g}")
        panel.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plots.close(figure)


def main() -> int:
    """Measure all jobs, and print them; after Ctrl-C, those that were measured."""
    longest, rounds, form, folder = sys.argv[1:]
    torch.set_num_threads(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    jobs, rows = bench_jobs(int(longest), device), list[NsaBenchRow]()
    Path(folder).mkdir(parents=True, exist_ok=True)
    table, figure = Path(folder) / "bench_nsa.csv", Path(folder) / "bench_nsa.png"
    log("BENCH", f"{len(jobs)} rows, one after the other into {table}")
    try:
        for row in measure(jobs, int(rounds), device):
            rows.append(row)
            write_csv(rows, table)
    except KeyboardInterrupt:
        log("BENCH", f"interrupted after {len(rows)} of {len(jobs)} rows")
    if rows:
        plot(rows, figure)
        log("BENCH", f"{table}, {figure}")
    machine = f"{cpu_model() if device == 'cpu' else device}, torch {version('torch')}"
    if form == "json":
        records = [asdict(row) for row in rows]
        document = {"schema_version": 1, "machine": machine, "rows": records}
        console.show(f"{json.dumps(document)}\n")
    elif rows:
        title = f"{machine}, medians of {rounds} round{'s' * (rounds != '1')} (range)"
        console.show(f"{title}\n\n{to_markdown(rows)}")
    return EXIT_DONE if len(rows) == len(jobs) else EXIT_INTERRUPTED


if __name__ == "__main__":
    console.run_main(main)
