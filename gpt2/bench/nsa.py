"""``make bench-nsa``: sparse beside full attention, as table, CSV file and figure. Imports no torch.

The measurement runs in a separate process, ``gpt2.bench.nsa_worker``.
"""

import csv
import io
import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lib.console import log
from lib.env.machine import MALLOC_VARIABLES
from lib.errors import Problem, RunError
from lib.files import write_atomic
from lib.project import python_module_command
from lib.report.figures import load_pyplot
from lib.report.render import markdown_table
from lib.units import MIB


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


def measure_in_subprocess(
    longest: int, rounds: int, path: Path
) -> tuple[str, list[NsaBenchRow], bool]:
    """Measure in a separate process, and write each row to the CSV file ``path`` as it arrives.

    Returns the device, the rows, and whether all rows were measured before Ctrl-C. Raises RunError
    if the process fails.
    """
    command = python_module_command("gpt2.bench.nsa_worker", str(longest), str(rounds))
    # The environment of the trainer's workers on a CPU.
    variables = {**os.environ, "OMP_NUM_THREADS": "1", **MALLOC_VARIABLES}
    device, total, rows = "", 0, list[NsaBenchRow]()
    # A separate session, so that Ctrl-C reaches only this process.
    with subprocess.Popen(
        command,
        env=variables,
        stdout=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                values = json.loads(line)
                if not total:
                    device, total = values["device"], values["rows"]
                    log("BENCH", f"{total} rows, one after the other into {path}")
                    continue
                rows.append(NsaBenchRow(**values))
                write_csv(rows, path)
            process.wait()
        except KeyboardInterrupt:
            log("BENCH", f"interrupted after {len(rows)} of {total} rows")
            return device, rows, False
        finally:
            process.terminate()
    if process.returncode:
        what = f"gpt2.bench.nsa_worker: process failed (exit code {process.returncode})"
        raise RunError(Problem(what, code="process.failed"))
    return device, rows, True


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
