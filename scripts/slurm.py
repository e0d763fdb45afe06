#!/usr/bin/env python3
"""Print the batch script that trains the runs of .config on a SLURM cluster, or submit it.

    slurm.py                 print the script, for sbatch or for an editor
    slurm.py --submit        submit it: an array of SLURM_WORKERS workers

Each worker takes runs until none is left. Imports no torch, so it works on a login node. Exit codes: 0
printed or submitted, 2 configuration, 3 no SLURM, or it refused the script.
"""

import sys

import _start

from gpt2.planning.arguments import (
    add_running,
    add_selection,
    add_submit,
    add_variable,
    asked_plan,
    new_parser,
)
from lib import console
from lib.console import log
from lib.errors import EXIT_DONE
from lib.project import ROOT
from lib.runner import slurm


def main() -> int:
    """Run the command line."""
    parser = new_parser(__doc__)
    add_selection(parser)
    add_running(parser)
    add_variable(parser, "runs", "only the runs that match these patterns")
    add_submit(parser)
    args = parser.parse()
    _, plan = asked_plan(args)
    plan = plan.only(args.runs)
    base = plan.base
    command = [sys.executable, str(ROOT / "scripts/run_test_matrix.py"), "--worker"]
    command += ["-O", str(args.build_dir.absolute())]
    command += parser.words(args, without=("submit", "build_dir"))
    gpus = 0 if base.machine.device == "cpu" else base.train.gpus
    script = slurm.batch_script(plan.folder, base.slurm, gpus, command)
    if not args.submit:
        console.show(script)
        return EXIT_DONE
    if base.slurm.options:
        log("SLURM", f"sbatch gets SLURM_OPTIONS: {base.slurm.options}")
    if base.slurm.setup:
        log("SLURM", f"each worker starts with SLURM_SETUP: {base.slurm.setup}")
    job = slurm.submit(script, plan.folder)
    log("SLURM", f"job {job}: {base.slurm.workers} workers for {len(plan.runs)} runs")
    if gpus:
        log("SLURM", "each worker tests the GPU on its node before its first run")
    log("NEXT", "make status; make stop; at the end make report")
    return EXIT_DONE


if __name__ == "__main__":
    console.run_main(main)
