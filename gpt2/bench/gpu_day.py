"""``make calibrate`` and ``make gpu-day``: measure a device and compare it with the predictions.

Imports no torch. Each part of ``gpu-day`` is a process, whose result is a file of the folder gpu-day
in the build folder; a second call continues with the parts that have no result of the same
configuration, code and torch.
"""

import argparse
import hashlib
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from gpt2.memory.cost import CALIBRATION, stored_calibrations
from gpt2.planning.arguments import add_json, add_selection, add_variable, asked_plan, whole_number
from lib.config.field import SymbolValue
from lib.console import log
from lib.env.gpu import find_gpu
from lib.errors import EXIT_DONE, EXIT_FAILED, EXIT_TIME_LIMIT, ConfigError, Problem, RunError
from lib.files import canonical_json, sha256_file, write_atomic, write_json
from lib.json_files import read_json_object
from lib.project import ROOT, python_module_command
from lib.report.render import json_document, markdown_table
from lib.runner.signals import SIGNAL_EXIT
from lib.runs.code import installed_torch
from lib.units import GIB

_WORKER, _REPEAT = "gpt2.bench.device_worker", "gpt2.bench.repeat_worker"
_STEP_SECONDS, _DEFAULT_MINUTES = 240, 40
# Longest sequence of sparse attention, by device.
_DEFAULT_TOKENS = {"cuda": 65536, "cpu": 2048}
# Margin of a calibrated card, at least: clocks and temperatures vary.
_MIN_MARGIN = 1.1
_ERROR_CHARACTERS = 2000
# For a part to end after it was interrupted.
_STOP_SECONDS = 10.0


def add_calibrate_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``calibrate``."""
    add_selection(parser)
    add_json(parser)
    parser.add_argument("--seconds", type=float, default=_STEP_SECONDS, help="time for the steps")


def plan_values(args: argparse.Namespace) -> dict[str, dict[str, SymbolValue]]:
    """Return the configuration of the first run of each variant of the plan, by slug."""
    runs = {run.variant.slug: run.config for run in reversed(asked_plan(args)[1].runs)}
    return {slug: dict(config.values) for slug, config in reversed(runs.items())}


def measured_rows(
    arguments: Sequence[str], named: Mapping[str, Mapping[str, SymbolValue]]
) -> list[dict[str, Any]]:
    """Return the rows that the worker prints for the configurations.

    Raises RunError if the worker fails before the first row; a later failure is a warning.
    """
    done = subprocess.run(
        python_module_command(_WORKER, *arguments),
        input=json.dumps(named),
        stdout=subprocess.PIPE,
        encoding="utf-8",
        check=False,
    )
    rows: list[dict[str, Any]] = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode:
        what = f"the measurement failed after {len(rows)} rows (exit code {done.returncode})"
        if not rows:
            raise RunError(Problem(what, code="process.failed"))
        log("WARN", what)
    return rows


def calibrated_rates(head: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the fields of DeviceRates with the factor and the margin of the measured steps.

    The factor is the geometric mean of measured / predicted.
    """
    ratios = [r["seconds"] / r["predicted_seconds"] for r in rows if r.get("predicted_seconds")]
    if not ratios:
        return dict(head["rates"])
    factor = statistics.geometric_mean(ratios)
    margin = max(_MIN_MARGIN, *(max(r / factor, factor / r) for r in ratios))
    source = f"{len(ratios)} steps on {head['device']}, torch {version('torch')}"
    return {**head["rates"], "factor": factor, "margin": margin, "source": source}


def calibrate(args: argparse.Namespace) -> tuple[int, str]:
    """Time the steps of .config on its device, and store rates, factor and margin."""
    head, *rows = measured_rows(["steps", str(args.seconds)], plan_values(args))
    rates = calibrated_rates(head, rows)
    args.build_dir.mkdir(parents=True, exist_ok=True)
    stored = stored_calibrations(args.build_dir)
    write_json(args.build_dir / CALIBRATION, {**stored, _card(head["device"]): rates})
    if args.json:
        document = {"device": head["device"], "rates": rates, "rows": rows}
        return EXIT_DONE, json_document(1, document)
    return EXIT_DONE, f"{_rates_text(head['device'], rates)}\n{_steps_table(rows, rates)}"


def _card(device: str) -> str:
    """Return the name of the device in the table of GPUs, or the device's own."""
    try:
        return find_gpu(device).name
    except ConfigError:
        return device


def _rates_text(device: str, rates: Mapping[str, Any]) -> str:
    flops = "".join(
        f"{kind} {value / 1e12:.3g} TFLOP/s, " for kind, value in rates["flops"].items()
    )
    memory = f"memory {rates['bytes_per_second'] / 1e9:,.0f} GB/s"
    launch = f"launch {rates['launch_seconds'] * 1e6:.1f} us"
    factor = f"measured / predicted {rates['factor']:.2f}, margin {rates['margin']:.2f}"
    return f"{device}: {flops}{memory}, {launch}; {factor}\n"


def _steps_table(rows: Sequence[Mapping[str, Any]], rates: Mapping[str, Any]) -> str:
    heads = ["step", "ms", "predicted ms", "tok/s"]
    heads += ["launches", "predicted launches", "busy", "GiB", "predicted GiB"]
    cells = [
        [
            row["step"],
            f"{row['seconds'] * 1e3:,.1f}",
            _number(row["predicted_seconds"], 1e3 * rates["factor"], ",.1f"),
            f"{row['tokens'] / row['seconds']:,.0f}",
            _number(row["launches"], 1, ",.0f"),
            _number(row["predicted_launches"], 1, ",.0f"),
            _number(row["busy_seconds"], 1 / row["seconds"], ".0%"),
            _number(row["peak_bytes"], 1 / GIB, ".2f"),
            _number(row["predicted_bytes"], 1 / GIB, ".2f"),
        ]
        for row in rows
        if "error" not in row
    ]
    text = markdown_table(heads, cells)
    for row in rows:
        if "error" in row:
            text += f"\n{row['step']}: {row['error']}\n"
        elif row["kernels"] or row["waits"]:
            kernels = ", ".join(f"{name} {ms:.1f} ms" for name, ms in row["kernels"])
            waits = f"; the host waited at {', '.join(dict.fromkeys(row['waits']))}" * bool(
                row["waits"]
            )
            text += f"\n{row['step']}: {kernels}{waits}\n"
    return text


def _number(value: float | None, factor: float, style: str) -> str:
    return "-" if value is None else format(value * factor, style)


def add_gpu_day_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of ``gpu_day``."""
    add_selection(parser)
    add_variable(parser, "minutes", f"when to stop (default {_DEFAULT_MINUTES})")
    add_variable(parser, "tokens", "longest sequence of the part nsa (default 65536; CPU: 2048)")


def gpu_day(args: argparse.Namespace) -> tuple[int, str]:
    """Run the parts that have no result yet, by worth, until the time is used; write report.md."""
    minutes = whole_number(args.minutes or str(_DEFAULT_MINUTES), "MINUTES")
    ends = time.monotonic() + 60 * minutes
    folder = args.build_dir.absolute() / "gpu-day"
    folder.mkdir(parents=True, exist_ok=True)
    values = plan_values(args)
    failed = False
    parts = _parts(args.build_dir.absolute(), values, args.tokens)
    keys = {name: _measured(command, values) for name, (_, command) in parts.items()}
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    try:
        for name, (seconds, command) in parts.items():
            left = ends - time.monotonic()
            if (done := _result(folder, name, keys[name])) and done["code"] == EXIT_DONE:
                continue
            if left < seconds:
                continue
            log("BENCH", f"{name}, at most {left:.0f} s")
            result = _run_part(command, left, values) | {"measured": keys[name]}
            write_json(folder / f"{name}.json", result)
            failed |= result["code"] not in (EXIT_DONE, EXIT_TIME_LIMIT)
            write_atomic(folder / "report.md", _report(folder, keys))
    except (KeyboardInterrupt, SystemExit):
        log("STOP", f"in {name}; the same command continues with this part")
        raise
    return EXIT_FAILED if failed else EXIT_DONE, _report(folder, keys)


def _end(number: int, frame: FrameType | None) -> NoReturn:
    """Raise SystemExit, so that the part that is running is stopped too."""
    raise SystemExit(SIGNAL_EXIT + number)


def _measured(command: Sequence[str], values: Mapping[str, Mapping[str, SymbolValue]]) -> str:
    """Return a digest of what a part measures: command, configurations, code and torch."""
    files = sorted(path for name in ("gpt2", "lib") for path in (ROOT / name).rglob("*.py"))
    facts = [list(command), values, list(map(sha256_file, files)), installed_torch()]
    return hashlib.sha256(canonical_json(facts).encode()).hexdigest()[:16]


def _parts(
    build_dir: Path, values: Mapping[str, Mapping[str, SymbolValue]], tokens: str
) -> dict[str, tuple[float, list[str]]]:
    """Return name → (seconds without which the part is not started, command)."""
    first = next(iter(values.values()))
    device = str(first["DEVICE"])
    repeated = (str(build_dir / "gpu-day" / "repeated"), device)
    longest = tokens or str(_DEFAULT_TOKENS[device])
    bench = [sys.executable, str(ROOT / "scripts" / "bench.py")]
    here = ["--build-dir", str(build_dir)]
    return {
        "calibrate": (60, [*bench, "calibrate", *here]),
        "parity": (40, python_module_command(_WORKER, "parity")),
        "plain": (60, python_module_command(_WORKER, "plain", str(first["BATCH_SIZE"]))),
        "repeat": (60, python_module_command(_REPEAT, *repeated)),
        "validate": (60, [sys.executable, str(ROOT / "scripts" / "validate_machine.py"), "--full"]),
        "nsa": (60, [*bench, "nsa", "--tokens", longest, "--rounds", "1", *here]),
    }


def _run_part(
    command: Sequence[str], seconds: float, values: Mapping[str, Mapping[str, SymbolValue]]
) -> dict[str, Any]:
    """Run a part for at most ``seconds``; return its exit code, time and output."""
    started = time.monotonic()
    # Variables of the make that runs this command are not meant for the parts.
    prefixes = ("KABLATE_", "MAKE", "MINUTES", "TOKENS")
    names = [name for name in os.environ if name.startswith(prefixes)]
    variables = {name: value for name, value in os.environ.items() if name not in names}
    # Not pipes: a process that the part started may outlive it.
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        with subprocess.Popen(
            command,
            env=variables,
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=errors,
            start_new_session=True,
        ) as process:
            try:
                process.communicate(json.dumps(values).encode(), timeout=seconds)
                code = process.returncode
            except subprocess.TimeoutExpired:
                _stop(process)
                code = EXIT_TIME_LIMIT
            except (KeyboardInterrupt, SystemExit):
                # The part has a session of its own, which no signal reaches.
                _stop(process)
                raise
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read().decode("utf-8", "replace"))
    return {
        "code": code,
        "seconds": time.monotonic() - started,
        "output": texts[0],
        "errors": texts[1][-_ERROR_CHARACTERS:] if code not in (EXIT_DONE, EXIT_TIME_LIMIT) else "",
    }


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Interrupt the process and its group, and kill them if they do not end."""
    for number in (signal.SIGINT, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            process.wait(_STOP_SECONDS)
            return
        except subprocess.TimeoutExpired:
            continue


def _result(folder: Path, name: str, measured: str) -> dict[str, Any] | None:
    """Return the result of a part; None if there is none, or one of something else."""
    path = folder / f"{name}.json"
    result = read_json_object(path) if path.exists() else {}
    return result if result.get("measured") == measured else None


def _report(folder: Path, keys: Mapping[str, str]) -> str:
    """Return all results as one Markdown document, which names the parts without a result.

    ``keys`` maps each part, in the order of their worth, to the digest of what it measures.
    """
    text = "# GPU day\n"
    results = {name: _result(folder, name, key) for name, key in keys.items()}
    if missing := [name for name, result in results.items() if result is None]:
        names = ", ".join(missing)
        text += f"\nWithout a result: {names}. The same command continues with these parts.\n"
    for name, result in results.items():
        if result is None:
            continue
        state = {EXIT_DONE: "done", EXIT_TIME_LIMIT: "stopped by the clock"}.get(
            result["code"], f"FAILED, exit code {result['code']}"
        )
        text += f"\n## {name}: {state}, {result['seconds']:.0f} s\n\n"
        text += _rows_table(result["output"]) + (
            f"\n{result['errors']}\n" if result["errors"] else ""
        )
    return text


def _rows_table(output: str) -> str:
    """Return JSON lines as a table with one column per field, and other output unchanged."""
    if not output.startswith("{"):
        return output
    rows = [json.loads(line) for line in output.splitlines() if line.endswith("}")]
    # Long, and the same for many rows.
    errors = dict.fromkeys(row.pop("error") for row in rows if "error" in row)
    heads = list(dict.fromkeys(key for row in rows for key in row))
    cells = [
        [f"{v:.3g}" if isinstance(v, float) else str(v) for v in (row.get(k, "") for k in heads)]
        for row in rows
    ]
    return markdown_table(heads, cells) + "".join(f"\n{error}\n" for error in errors)
