"""The NSA benchmark: counts, output files and arithmetic. No test asserts a speed."""

import csv
import json
import signal
import time
from dataclasses import replace
from itertools import pairwise

from gpt2.bench import nsa
from gpt2.bench.nsa import to_markdown
from tests.lib.terminal import unaligned


def test_the_command_line(build):
    folder = build()
    arguments = ("--tokens", "512", "--rounds", "1", "--json")
    python = folder.server.interpreter()
    bench = folder.start("scripts/bench.py", "nsa", *arguments, python=python)
    code, out, said = bench.wait(), bench.stdout, bench.stderr
    assert code == 0, said
    progress = [line for line in said.splitlines() if line.startswith("BENCH ")]
    assert "10 rows" in progress[0] and "bench_nsa.csv" in progress[0]
    (last,) = [line for line in progress if "100%" in line]
    for value in ("n=8, w=256", "decode", "2,048", "2 of 2", "00:00"):
        assert value in last
    rows = json.loads(out)["rows"]
    found = {(row["setting"], row["work"], row["tokens"]): row for row in rows}
    prefill = found["n=16, w=512", "forward + backward", 512]
    # Every block and the whole window are seen, and the compressed blocks besides.
    pairs = 512 * 513 // 2
    assert prefill["full_keys"] == pairs and prefill["nsa_keys"] > 2 * pairs
    assert prefill["full_saved_bytes"] > 0 and prefill["nsa_saved_bytes"] > 0
    # Table 4 of Yuan et al. 2025: 1599 at 1024 tokens; 16 are timed, warm-up included.
    decode = found["n=16, w=512", "decode", 1024]
    assert abs(decode["nsa_keys"] - 1599) < 64 and decode["full_keys"] == 1024 + 8
    assert all(row["lowest"] <= row["ratio"] <= row["highest"] for row in rows)
    with (folder.path / "bench_nsa.csv").open(newline="") as lines:
        assert len(list(csv.DictReader(lines))) == len(rows) == 10
    assert (folder.path / "bench_nsa.png").read_bytes().startswith(b"\x89PNG")


def test_ctrl_c_keeps_what_is_measured(build):
    folder = build()
    table = folder.path / "bench_nsa.csv"
    bench = folder.start("scripts/bench.py", "nsa")
    deadline = time.monotonic() + 60
    while not table.exists():
        assert bench.poll() is None and time.monotonic() < deadline, bench.stderr
        time.sleep(0.02)
    bench.signal(signal.SIGINT)
    assert bench.wait(60) == 130, bench.stderr
    # The process that measures has ended too.
    assert bench.processes() == []
    with table.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert rows and f"{len(rows)} of 40" in bench.stderr
    assert unaligned(bench.stdout).count("| n=16, w=512 | forward ") == len(rows)
    assert (folder.path / "bench_nsa.png").exists() and "Traceback" not in bench.stderr


def test_what_is_too_short_is_refused(build):
    code, _, said = build().command("scripts/bench.py", "nsa", "--tokens", "100")
    assert code == 2 and "TOKENS" in said and "[usage.out-of-range]" in said


def test_both_sides_take_turns_and_the_faster_full_one_counts(monkeypatch):
    seconds = iter([9.0, 9.0, 9.0, 1.0, 4.0, 3.0, 2.0, 3.0, 8.0])
    order = []
    monkeypatch.setattr(nsa, "_seconds", lambda side, device: side() or next(seconds))
    sides = {name: lambda name=name: order.append(name) for name in ("nsa", "expanded", "gqa")}
    times = nsa.time_sides(sides, 2, "cpu")
    assert order == ["nsa", "expanded", "gqa"] * 3
    row = nsa._row("s", "forward", 8, times, (36, 18), {})
    assert (row.lowest, row.ratio, row.highest) == (1.5, 2.25, 3.0) and row.keys_ratio == 2
    assert "| s | forward | 8 | 1,500.00 | 3,500.00 | 5,500.00 | 2.25 (1.50 to 3.00) | 2.00 |" in (
        unaligned(to_markdown([row]))
    )


def test_growth_is_that_of_four_times_the_tokens():
    short = nsa._row(
        "s", "forward", 8, {"nsa": [1.0], "expanded": [2.0], "gqa": [3.0]}, (36, 18), {}
    )
    longer = replace(short, tokens=32, nsa_ms=5000.0, expanded_ms=30000.0, gqa_ms=28000.0)
    lines = to_markdown([short, longer]).splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert ["s", "forward", "8 to 32", "5.0", "14.0"] in [row[:5] for row in cells]
    assert "8 to" not in to_markdown([short, replace(longer, tokens=16)])


def test_saved_bytes_grow_with_the_length():
    options = nsa.nsa_options("n=8, w=256")
    saved = [
        nsa.saved_bytes(nsa.prefill(options, tokens, "cpu")["forward + backward"]["nsa"])
        for tokens in (128, 256, 512)
    ]
    assert all(b / a <= 2.1 for a, b in pairwise(saved))
