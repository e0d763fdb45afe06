"""Fake trainer: counts steps, resumes, and fails on request."""

import contextlib
import errno
import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lib.files import write_json
from lib.runs.manifest import add_artifact_digests
from lib.runs.record import required_files
from lib.runs.run_dir import RunDir, RunStatus, State, write_status


def train(
    run_dir: Path,
    report: Callable[..., None],
    stop: Callable[[], bool],
    guard: Callable[[], None],
) -> None:
    """Run the steps of behaviour.json, one line each in steps.txt; resume after the last step."""
    run = RunDir(run_dir)
    behaviour = json.loads((run_dir / "behaviour.json").read_text())
    with open(run_dir / "ranks.txt", "a") as stream:
        stream.write(f"{os.environ['RANK']}/{os.environ['WORLD_SIZE']}\n")
    if os.environ["RANK"] != "0":
        misbehave(behaviour.get("rank_1", behaviour["fails_by"]), behaviour)
        return
    done, total = run_dir / "steps.txt", behaviour["steps"]
    first = len(done.read_text().splitlines()) if done.exists() else 0
    write_status(run, RunStatus(State.RUNNING, iteration=first, iterations=total))
    with open(behaviour["journal"], "a") as journal:
        journal.write(f"{run_dir.name} {first}\n")
    print("hello from", run_dir.name, flush=True)
    report({"kind": "line", "tag": "TRAIN", "text": f"a cpu | folder {run_dir.name} | fp32"})
    for step in range(first, total):
        if stop():
            guard()
            message = f"interrupted; saved at iteration {step}"
            write_status(run, RunStatus(State.INTERRUPTED, 130, message, step, total))
            return
        time.sleep(behaviour["step_seconds"])
        if step == behaviour["fail_at"]:
            misbehave(behaviour["fails_by"], behaviour)
        guard()
        with open(done, "a") as stream:
            stream.write(f"{step}\n")
        if not behaviour.get("silent"):
            news = {"progress": (step + 1) / total, "iteration": step + 1, "iterations": total}
            report({"kind": "progress", **news, "first_progress": first / total, "loss": 3.0})
    guard()
    report({"kind": "line", "tag": "DONE", "text": "val loss 3.0"})
    if behaviour["fails_by"] == "full":
        raise OSError(errno.ENOSPC, "No space left on device", str(run.manifest))
    for file in required_files(run):
        if not file.exists():
            file.write_text("x")
    write_json(run.manifest, add_artifact_digests(run, {"volatile": {}}))
    write_status(run, RunStatus(State.SUCCESS, iteration=total, iterations=total))


def misbehave(how: str, behaviour: dict[str, Any]) -> None:
    """Fail in one way unless the file ``healed`` exists."""
    if Path(behaviour["healed"]).exists():
        return
    match how:
        case "raising":
            raise ZeroDivisionError("division by a fake")
        case "following":
            time.sleep(0.2)
            raise ConnectionError("the connection to the other rank is gone")
        case "sigkill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "stopping":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "waiting for data":
            # As a file of a server that does not answer.
            with contextlib.suppress(FileExistsError):
                os.mkfifo(behaviour["journal"] + ".fifo")
            with open(behaviour["journal"] + ".fifo", "rb") as data:
                data.read()
        case "killing the server":
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
