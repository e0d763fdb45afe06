"""``kablate`` on a machine with fake GPUs: ``fake_gpus.py COMMAND ...``, FAKE_GPUS as JSON.

Its keys: ``count``; ``busy``, an index that another program uses; ``lost``, names of GPUs that fail from
the moment on at which a run uses them; ``journal``, the file with a line for each process that trains.
The fork server imports this module; only then is anything replaced.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FAKE = json.loads(os.environ["FAKE_GPUS"])


def visible() -> list[str]:
    """Return the names of the visible GPUs."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return names.split(",") if names else [str(n) for n in range(FAKE["count"])]


def use(index: int) -> None:
    """Use a GPU, as any operation does."""
    if visible()[index] in FAKE["lost"]:
        raise RuntimeError("CUDA error: GPU is lost\nCompile with TORCH_USE_CUDA_DSA")


def train_run(
    run_dir: Path, build_dir: Path, report: Callable[..., None], *rest: object, **named: object
) -> None:
    """Write a line to the journal, use the GPU of the rank, and finish the run."""
    from lib.env.ranks import current_process
    from lib.files import write_json
    from lib.runs.manifest import add_artifact_digests
    from lib.runs.record import required_files
    from lib.runs.run_dir import RunDir, RunStatus, State, write_status

    run, process = RunDir(run_dir), current_process()
    place = {"run": run_dir.name, "rank": process.rank, "world": process.world_size}
    with open(FAKE["journal"], "a") as journal:
        journal.write(json.dumps({**place, "gpus": visible(), "at": time.monotonic()}) + "\n")
    if process.rank == 0:
        write_status(run, RunStatus(State.RUNNING, iterations=2))
        shares = {"progress": 0.5, "first_progress": 0.0}
        report({"kind": "progress", **shares, "iteration": 1, "iterations": 2, "loss": 3.0})
    # Long enough for runs on the other GPUs to begin.
    time.sleep(FAKE["seconds"])
    use(process.local_rank)
    if process.rank == 0:
        for file in required_files(run):
            if not file.exists():
                file.write_text("x")
        write_json(run.manifest, add_artifact_digests(run, {"volatile": {}}))
        write_status(run, RunStatus(State.SUCCESS, iteration=2, iterations=2))


def install() -> None:
    """Replace what torch and the driver report, and the training."""
    import torch

    import gpt2.running.preflight
    import gpt2.training.loop
    import lib.env.preflight
    import lib.tracking.telemetry

    properties = SimpleNamespace(name="Fake", total_memory=1 << 34, major=9, minor=0)
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    cuda.device_count = lambda: len(visible())
    cuda.get_device_name = lambda *index: "Fake"
    cuda.get_device_properties = lambda index: properties
    cuda.is_bf16_supported = lambda **options: True
    readings = [
        {"index": n, "memory_used_mib": 9e4 if n == FAKE["busy"] else 9.0}
        for n in range(FAKE["count"])
    ]
    modules: Any = (
        gpt2.running.preflight,
        lib.env.preflight,
        lib.tracking.telemetry,
        gpt2.training.loop,
    )
    preflight, machine, telemetry, loop = modules
    telemetry.read_gpus = lambda count, *, rocm: readings
    preflight._kernel_problems = lambda configs: []
    preflight._snapshot_problems = lambda *given: []
    machine.use_gpu = use
    loop.train_run = train_run


if __name__ == "__main__":
    from gpt2.running import backend
    from lib import console
    from lib.kablate import call

    backend.PRELOADED_MODULES += ("tests.integration.fake_gpus",)
    folder, name, words = sys.argv[2], sys.argv[3], sys.argv[4:]
    console.run_main(lambda: int(call(name, ["-O", folder, *words])))
else:
    install()
