"""``plan``, ``status``, ``watch``, ``stop`` and ``slurm``: the commands that train nothing themselves."""

import sys
import time
from argparse import Namespace
from pathlib import Path

from gpt2.study import view
from gpt2.study.arguments import asked_plan
from lib import console
from lib.console import log
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, PreflightError, Problem
from lib.kablate import option_words
from lib.project import ROOT
from lib.runner import runner
from lib.runner import slurm as cluster


def plan(options: Namespace) -> str:
    """List the runs of .config and the cost of each. Trains nothing, writes nothing.

    For each run: parameters, the ratio of MLP to attention parameters and the actual widths (first and
    last block if they differ), FLOPs and tokens of training, time, state, and the changes against the
    parent. The time of a done run is measured; other times are estimated from the done runs of the plan.
    Without a done run, the estimate is this CPU's matrix product speed (marked ~), or "-" on a GPU. With
    --probe, some steps and an evaluation of each distinct model are timed on this machine, on drawn
    tokens. With --gpu h100, the memory of a step on this GPU is predicted, and the time is that of a
    stated share of its peak (docs/gpu.md). Your own text is read, to know whether it can be split; if not,
    the exit code is 3.
    """
    if options.probe and options.gpu:
        what = f"conflicts with GPU={options.gpu} (expected one of both)"
        advice = "type: make plan PROBE=1, on the machine with the GPU"
        raise ConfigError(Problem(what, "PROBE", advice, code="usage.conflict"))
    runs = asked_plan(options)
    configs = [run.config for run in runs.runs if run.config.data.dataset == "custom"]
    if configs:
        # Imports numpy, which no other plan needs.
        from gpt2.data.prepare import try_preparation

        for data, block_size in {(c.data, c.model.shape.block_size): None for c in configs}:
            try_preparation(data, runs.build_dir, block_size)
    views = view.look(runs, options.gpu, options.probe)
    if options.json:
        return view.to_json(runs, views)
    width = None if console.is_verbose() else console.terminal_columns(sys.stdout)
    return f"{view.plan_text(runs, views, width)}\n"


def status(options: Namespace) -> str:
    """Show the progress and remaining time of the runs of .config. Starts nothing, writes nothing.

    The remaining time of a running run is its live estimate; of other runs, the one of "make plan".
    """
    runs = asked_plan(options)
    views = view.look(runs)
    if options.one_line:
        return f"{view.summary_line(runs, views)}\n"
    if options.json:
        return view.to_json(runs, views)
    text = view.status_text(runs, views, console.terminal_columns(sys.stdout))
    return f"{text}\n" + "".join(f"{job}\n" for job in _queued(runs.folder))


def _queued(folder: Path) -> list[cluster.QueuedJob]:
    """Return the study's SLURM jobs; logs why they are unknown."""
    try:
        return cluster.queued_jobs(folder)
    except PreflightError as error:
        log("WARN", str(error))
        return []


def watch(options: Namespace) -> int:
    """Show the started runs of .config, running or finished, with their alarms. Starts nothing.

    On a terminal, the view is refreshed until no run is running (Ctrl-C exits earlier). Without a
    terminal, or with --json, the view is printed once, with exit code 1 if there is an alarm.
    """
    from lib.tracking import watch as monitor

    runs = asked_plan(options)
    watched = monitor.WatchedRuns(runs.runs, runs.base.telemetry.stall_seconds)
    if sys.stdout.isatty() and not options.json:
        monitor.watch(lambda: watched.lines(time.time()))
        return EXIT_DONE
    lines = watched.lines(time.time())
    console.show(monitor.lines_to_json(lines) if options.json else monitor.lines_to_text(lines))
    return EXIT_FAILED if any(line.alarms for line in lines) else EXIT_DONE


def stop(options: Namespace) -> int:
    """Stop running runs after the current optimizer step and save a checkpoint. make resumes them.

    kablate stop                   all runs, and every make that trains them, on any machine
    kablate stop --runs 'ra*,7'    selected runs; make continues with the others
    """
    runs = asked_plan(options)
    if options.runs:
        return runner.request_stop(runs.matching(options.runs))
    return runner.request_stop(runs.runs, runs.folder)


def slurm(options: Namespace) -> str | int:
    """Print the batch script that trains the runs of .config on a SLURM cluster, or submit it.

    kablate slurm                 print the script, for sbatch or for an editor
    kablate slurm --submit        submit it: an array of SLURM_WORKERS workers

    Each worker takes runs until none is left. Imports no torch, so it works on a login node. Exit
    codes: 0 printed or submitted, 2 configuration, 3 no SLURM, or it refused the script.
    """
    runs = asked_plan(options)
    runs = runs.only(options.runs)
    base = runs.base
    goes_on = vars(options).pop("continue")
    command = [sys.executable, str(ROOT / "scripts/run_test_matrix.py"), "--worker"]
    command += ["-O", str(options.build_dir.absolute()), *option_words("all", options)]
    gpus = 0 if base.machine.device == "cpu" else base.train.gpus
    script = cluster.batch_script(runs.folder, base.slurm, gpus, command)
    if not options.submit:
        return script
    if goes_on:
        from gpt2.running.continued import continue_half_trained

        continue_half_trained(runs.runs, runs.folder)
    if base.slurm.options:
        log("SLURM", f"sbatch gets SLURM_OPTIONS: {base.slurm.options}")
    if base.slurm.setup:
        log("SLURM", f"each worker starts with SLURM_SETUP: {base.slurm.setup}")
    job = cluster.submit(script, runs.folder)
    log("SLURM", f"job {job}: {base.slurm.workers} workers for {len(runs.runs)} runs")
    if gpus:
        log("SLURM", "each worker tests the GPU on its node before its first run")
    log("NEXT", "make status; make stop; at the end make report")
    return EXIT_DONE
