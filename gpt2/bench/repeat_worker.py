"""Train a small run on this device: again, killed and resumed, and on two GPUs if there are two.

    python -m gpt2.bench.repeat_worker FOLDER cpu|cuda

Empties FOLDER first. Prints one JSON line for each comparison; exit code 1 if one of them is not
bitwise equal.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lib.errors import Problem, RunError
from lib.project import ROOT

_DEFCONFIG = "defconfig-gpt2-quickstart"
# Threads that wait for each other would take most of the time on a CPU with other load.
_SETTINGS = "SINGLE_TRAINING=y CHECKPOINT_INTERVAL=20 MAX_ITERS=200 CPU_THREADS=1"
# Variables that select runs of the study from whose measurement this process was started.
_SELECTION = ("STEPS", "SEEDS", "SEED", "SET", "SWEEP", "SAMPLES", "RUNS", "JSON")
_POLL_SECONDS, _START_SECONDS = 0.1, 120.0


def make(folder: Path, *arguments: str) -> list[str]:
    """Return a command of make for the build folder."""
    return ["make", "-s", "-C", str(ROOT), f"PYTHON={sys.executable}", f"O={folder}", *arguments]


def trained(folder: Path, settings: Sequence[str]) -> Path:
    """Train the run of ``settings`` to its end; return its directory."""
    subprocess.run(make(folder, _DEFCONFIG), check=True, stdout=sys.stderr)
    subprocess.run(make(folder, "all", *settings), check=True, stdout=sys.stderr)
    (summary,) = folder.rglob("summary.json")
    return summary.parent


def killed(folder: Path, settings: Sequence[str]) -> None:
    """Start the run of ``settings`` and kill its processes after the first checkpoint.

    Raises RunError unless the killed run has a checkpoint and no result.
    """
    subprocess.run(make(folder, _DEFCONFIG), check=True, stdout=sys.stderr)
    process = subprocess.Popen(
        make(folder, "all", *settings), stdout=sys.stderr, start_new_session=True
    )
    ends = time.monotonic() + _START_SECONDS
    try:
        while time.monotonic() < ends and process.poll() is None:
            if any(folder.rglob("checkpoints/*/*")):
                break
            time.sleep(_POLL_SECONDS)
    finally:
        # The run may have ended by itself. Ctrl-C does not reach its session.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not any(folder.rglob("checkpoints/*/*")) or any(folder.rglob("summary.json")):
        what = f"{folder}: no run to resume (expected a checkpoint and no result)"
        raise RunError(Problem(what, code="process.failed"))


def report(name: str, command: Sequence[str]) -> bool:
    """Run a comparison and print its result; return whether it succeeded."""
    done = subprocess.run(command, stdout=subprocess.PIPE, encoding="utf-8", check=False)
    lines = [line for line in done.stdout.splitlines() if line.strip()]
    # The first line is the verdict; if it is another, the next ones say why.
    text = " ".join(lines[: 1 if done.returncode == 0 else None])
    sys.stdout.write(json.dumps({"comparison": name, "code": done.returncode, "text": text}) + "\n")
    sys.stdout.flush()
    return done.returncode == 0


def main() -> int:
    """Run the comparisons."""
    for name in _SELECTION:
        os.environ.pop(name, None)
    folder, device = Path(sys.argv[1]), sys.argv[2]
    if folder.exists():
        shutil.rmtree(folder)
    settings = [f"SET=DEVICE_{device.upper()}=y {_SETTINGS}", "ALLOW_DIRTY=y"]
    first = trained(folder / "first", settings)
    equal = report("trained again", make(folder / "first", "reproduce", f"RUN={first}"))
    killed(folder / "killed", settings)
    resumed = trained(folder / "killed", settings)
    compare = make(folder / "first", "compare", f"A={first}", f"B={resumed}")
    equal &= report("killed and resumed", compare)
    if torch.cuda.device_count() > 1:
        ranks = trained(folder / "ranks", [*settings, "GPUS=2"])
        report("two GPUs", make(folder / "first", "compare", f"A={first}", f"B={ranks}"))
    return 0 if equal else 1


if __name__ == "__main__":
    sys.exit(main())
