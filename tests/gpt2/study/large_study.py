"""Fabricate a finished study of many runs, and time the commands that read it.

``python -m tests.gpt2.study.large_study FOLDER SEEDS [COMMAND...]`` writes the study unless FOLDER
exists, and prints seconds and seconds of processor time of each command.
"""

import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpt2.study.plan import config_layers, make_plan
from lib.config.dotconfig import defconfig_layers
from lib.env.gpu import cpu_model
from lib.files import sha256_file
from lib.project import ROOT, python_module_command
from lib.runs.code import NOT_TRAINING, installed_torch
from tests.build_folder import write_build
from tests.lib.fabricated import MANIFEST, changed
from tests.lib.report.fabricated_study import write_planned

COMMANDS = {
    "plan": ("plan",),
    "status": ("status",),
    "watch": ("watch",),
    "report": ("report",),
    "ls": ("ls",),
}


def write_large_study(
    folder: Path, seeds: int, *, iterations: int = 60, documents: int = 10
) -> None:
    """Write a build folder with all steps of the study, finished with ``seeds`` seeds by this code."""
    folder.mkdir(parents=True)
    write_build(folder, {"DEVICE_CPU": True}, *defconfig_layers(ROOT, "gpt2-ratio-small"))
    plan = make_plan(config_layers(folder), folder, steps="all", seeds=f"1-{seeds}")
    manifest = changed(MANIFEST, origin=this_origin())
    for run in plan.runs:
        own = {**manifest, "run": {"hash8": run.config.hash8}}
        write_planned(run, iterations, documents, symbols=run.config.values, manifest=own)


def this_origin() -> dict[str, Any]:
    """Return the origin that a run of this code on this machine records."""
    files = [
        str(p.relative_to(ROOT)) for part in ("gpt2", "lib") for p in ROOT.glob(f"{part}/**/*.py")
    ]
    sources = {f: sha256_file(ROOT / f) for f in sorted(files) if not f.startswith(NOT_TRAINING)}
    return {"torch": installed_torch(), "device": cpu_model(), "sources": sources}


def main() -> None:
    """Run the command line."""
    folder, seeds = Path(sys.argv[1]), int(sys.argv[2])
    if not folder.exists():
        write_large_study(folder, seeds)
    for name in sys.argv[3:] or COMMANDS:
        script, *options = COMMANDS[name]
        words = [*options, "-O", str(folder)]
        words += [] if name == "ls" else ["--steps", "all", "--seeds", f"1-{seeds}"]
        command = python_module_command("lib.kablate", script, *words)
        before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
        done = subprocess.run(
            command, stdout=subprocess.DEVNULL, env={**os.environ, "ALLOW_DIRTY": "y"}
        )
        seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        print(
            f"{name}: {seconds:.2f} s, processor {cpu:.2f} s, exit code {done.returncode}",
            flush=True,
        )


if __name__ == "__main__":
    main()
