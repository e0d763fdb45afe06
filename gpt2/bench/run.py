"""Run a benchmark and print its tables: python -m gpt2.bench.run REQUEST, as JSON."""

import json
import sys
import time
from importlib.metadata import version
from typing import Any

import torch

from gpt2.bench.gpu import gpu_cases
from gpt2.bench.nsa import nsa_cases
from gpt2.bench.step import step_case
from gpt2.bench.timing import Case, Figures, Stopwatch, to_markdown
from gpt2.config import Config
from gpt2.running.preflight import gpu_name
from lib import console
from lib.env.gpu import cpu_model
from lib.env.machine import set_up
from lib.env.preflight import require_machine
from lib.env.ranks import current_process
from lib.errors import EXIT_DONE, EXIT_INTERRUPTED
from lib.report.render import json_document

# All tables of a GPU.
LIMIT_SECONDS = 480.0


def prepared(request: dict[str, Any]) -> tuple[list[Case], Stopwatch]:
    """Set up this process; return the cases of a request. Raises PreflightError without the device."""
    rounds = request["rounds"]
    if request["kind"] == "nsa":
        torch.set_num_threads(1)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        clock = time.perf_counter if device.type == "cuda" else time.process_time
        return nsa_cases(request["longest"], device), Stopwatch(device, rounds, clock=clock)
    config = Config.from_values(request["values"])
    require_machine(config.machine)
    device = set_up(config.machine, current_process())
    if request["kind"] == "gpu":
        return gpu_cases(device), Stopwatch(device, rounds, LIMIT_SECONDS)
    return [step_case(request["label"], config, device)], Stopwatch(device, rounds)


def main() -> int:
    """Measure all cases, and print them; after Ctrl-C, those that were measured."""
    request = json.loads(sys.argv[1])
    cases, stopwatch = prepared(request)
    measured, code = list[Figures](), EXIT_DONE
    try:
        for figures in stopwatch.measure(cases):
            measured.append(figures)
    except KeyboardInterrupt:
        console.log("BENCH", f"interrupted after {len(measured)} of {len(cases)} cases")
        code = EXIT_INTERRUPTED
    device = gpu_name() if stopwatch.on_gpu else cpu_model()
    machine = f"{device}, torch {version('torch')}"
    if request["json"]:
        console.show(json_document(2, {"machine": machine, "cases": measured}))
    elif measured:
        title = f"{machine}, medians of {request['rounds']} rounds"
        console.show(f"{title}\n\n{to_markdown(measured)}")
    return code


if __name__ == "__main__":
    console.run_main(main)
