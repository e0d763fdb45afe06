"""View of a plan: state, size, speed and remaining time of each run, as text and JSON.

Reads configurations and run directories. Imports no torch.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from gpt2.config import Config
from gpt2.model_config import ModelConfig
from gpt2.study.cost import GPU_SHARE, estimated_on_gpu, estimated_speed, evaluations, probed
from gpt2.study.notes import note_lines
from gpt2.study.plan import Plan
from gpt2.study.power import power_text, study_power
from gpt2.training.budget import TrainingBudget
from lib.console import folded
from lib.env.gpu import count_gpus, cpu_model, find_gpu, usable_cores
from lib.errors import visible
from lib.json_files import RecordError
from lib.report.render import fitting_rows, json_document, text_lines
from lib.runner.queue import STALE_ADVICE, stale_text
from lib.runs.code import TreeDigests, run_drift
from lib.runs.lease import current_holder
from lib.runs.record import UNKNOWN, RunRecord
from lib.runs.run import Run
from lib.runs.run_dir import RunDir, State
from lib.units import count, format_duration, format_si, format_size

# A planned run, as in make plan JSON=1. Times are seconds, None if unknown.
Row = dict[str, Any]

SCHEMA_VERSION = 1
# Of a continued line.
_INDENT = " " * 8
_STUDY_NAMES = {"single": "one training", "matrix": "test matrix"}
# States of a finished run; a stale one was made by other code.
_DONE = ("done", "stale")


def look(plan: Plan, gpu: str = "", probe: bool = False) -> list[Row]:
    """Return a row for every run of the plan, in order.

    With the name of a ``gpu``, time and memory of runs that are not done are estimated for it; with
    ``probe``, steps of each model are timed on this machine. Raises ConfigError if the GPU is unknown,
    and PreflightError if a probe lacks its device.
    """
    tree = TreeDigests()
    models = {id(run.config.model): run.config.model for run in plan.runs}
    sizes = {key: _sizes(model) for key, model in models.items()}
    rows = [{**_progress(run, tree), **sizes[id(run.config.model)]} for run in plan.runs]
    speeds = [
        speed * row["flops_per_token"] for row in rows if (speed := row.pop("tokens_per_second"))
    ]
    configs = [run.config for run in plan.runs]
    if probe:
        estimates = probed([run.label for run in plan.runs], configs, plan.build_dir)
    elif gpu:
        estimates = estimated_on_gpu(configs, gpu)
    else:
        estimates = [estimated_speed(plan.base, speeds)] * len(rows)
    for row, config, estimate in zip(rows, configs, estimates, strict=True):
        _add_time(row, config, estimate)
    return rows


def _sizes(model: ModelConfig) -> Row:
    """Return sizes and cost of a model; a / joins those of the first and the last block."""
    mlp, sites = model.mlp, model.sites()
    ends = [sites[0], sites[-1]]

    def joined(values: Sequence[object]) -> str:
        return "/".join(dict.fromkeys(map(str, values)))

    sizes = [mlp.size(site) for site in ends]
    widths = [f"M {joined([size.hidden for size in sizes])}"]
    for name in (mechanism.name for mechanism in mlp.mechanisms if mechanism.sized):
        values = [size.widths.get(name, "-") for size in sizes]
        widths.append(f"{name.removeprefix('mlp_')} {joined(values)}")
    return {
        "parameters": model.num_params(),
        # MLP parameters / attention parameters.
        "ratio": joined([f"{mlp.built_ratio(site):.3f}" for site in ends]),
        "widths": " ".join(widths),
        "flops_per_token": model.flops_per_token(),
        # Query-key pairs per token and head: mean over a context, and keys read by the last token.
        "pairs_per_token": model.pairs_per_token(),
        "reads": model.reads(),
    }


def _progress(run: Run[Config], tree: TreeDigests) -> Row:
    """Return what the directory of a run contains, and its budget."""
    record, budget = RunRecord(RunDir(run.path)), TrainingBudget(run.config)
    state, problem, changes = _state(run, record, tree)
    timing = latest = None
    with contextlib.suppress(RecordError, IndexError):
        timing = record.timing if state in _DONE else None
        # The status of a running run has the iteration of its last checkpoint.
        latest = record.timings[-1] if state == "running" else None
    status = record.status
    left = 0.0 if state in _DONE else None
    if latest and latest.eta_seconds is not None:
        # A resumed run trains again, from the time of its status, what followed its checkpoint.
        begun = max(latest.written_at, status.written_at if status else 0.0)
        left = max(0.0, latest.eta_seconds - (time.time() - begun))
    # A name alone is y.
    changed = (n if v is True else f"{n}={v}" for n, v in (run.variant.delta or {}).items())
    return {
        "label": run.label,
        "directory": str(run.path),
        "seed": run.seed,
        "delta": f"{run.variant.parent} + " * bool(run.variant.parent) + " ".join(changed),
        # None with a time budget.
        "tokens": None if budget.is_time else budget.iterations * budget.tokens_per_iteration,
        "evaluations": None if budget.is_time else evaluations(run.config),
        # Multiple of the configured budget that the run trains for by design.
        "stretch": budget.stretch,
        "state": state,
        # Of a stale run: source files, torch version and device that changed; of a damaged one.
        "changes": changes,
        "problem": problem,
        # Machine, process and SLURM job that train the run.
        "holder": str(current_holder(record.run) or "") if state == "running" else "",
        "iteration": max(status.iteration if status else 0, latest.iteration if latest else 0),
        "iterations": budget.iterations,
        "seconds_left": left,
        # Training time only, without start-up; with evaluations if a probe measured them.
        "seconds": timing.train_seconds if timing else None,
        "tokens_per_second": timing.tokens_per_second if timing else None,
    }


def _state(
    run: Run[Config], record: RunRecord, tree: TreeDigests
) -> tuple[str, str, Sequence[str]]:
    """Return the state of a run, the cause if it is damaged, and what changed if it is stale."""
    if not record.is_done:
        return record.state, record.damage, ()
    configuration = UNKNOWN
    with contextlib.suppress(RecordError):
        configuration = str(record.manifest.find("run", "hash8"))
    if configuration not in (UNKNOWN, run.config.hash8):
        return State.DAMAGED.word, f"of another run, configuration {configuration}", ()
    # The model of a GPU cannot be read without torch.
    device = cpu_model() if run.config.machine.device == "cpu" else None
    changes = run_drift(record, device, tree)
    return "stale" if changes else record.state, "", changes


def _add_time(row: Row, config: Config, estimate: Row) -> None:
    """Add the expected time, and its source: measured (done), configured (a time budget), or estimated."""
    row |= {"gpu": "", "peak_bytes": None, "probe": None, "unmeasured": "", **estimate}
    speed, probe, budget = row.pop("flops_per_second", None), row["probe"], TrainingBudget(config)
    if row["seconds"] is not None:
        row["seconds_from"] = "measured"
    elif budget.is_time:
        row |= {"seconds": budget.seconds, "seconds_from": "configured"}
    elif probe:
        steps = budget.iterations * probe["step_seconds"]
        row["seconds"] = steps + row["evaluations"] * probe["evaluation_seconds"]
    elif speed:
        row["seconds"] = row["tokens"] * row["flops_per_token"] / speed
    if row["seconds_left"] is None and row["seconds"] is not None:
        done = row["iteration"] / budget.iterations if budget.iterations else 0.0
        row["seconds_left"] = row["seconds"] * (1 - done)


# Text.


def plan_text(plan: Plan, rows: Sequence[Row], width: int | None = None) -> str:
    """Format the plan as columns of at most ``width`` characters, notes, and a summary line."""
    cells = [_cells(plan, run, row) for run, row in zip(plan.runs, rows, strict=True)]
    columns = {
        name: [row[name] for row in cells] for name in cells[0] if any(r[name] for r in cells)
    }
    if len({*columns["pairs"]}) == 1:
        del columns["pairs"], columns["reads"]
    lines = fitting_rows(columns, list(columns), width)
    hidden = ", ".join(name for name in columns if name not in lines[0])
    notes = [
        f"not shown: {hidden} (V=1 shows all columns)" if hidden else "",
        *(f"skipped  {problem}" for problem in plan.left_out),
        *_state_notes(plan, rows),
        *_model_notes(plan),
        *_time_notes(plan, rows),
        _look_note(plan),
        str(plan.micro_batch or ""),
        power_text(study_power(plan, [row["seconds"] for row in rows])).rstrip("\n"),
        summary_line(plan, rows),
    ]
    return _text(lines, notes, width)


def _cells(plan: Plan, run: Run[Config], row: Row) -> dict[str, str]:
    """Return the columns of a run, the most important first; one without a text is not shown."""
    train, probe = run.config.train, row["probe"]
    per_step = train.tokens_per_iteration(run.config.model.shape.block_size)
    about = "~" * (row["seconds_from"] in ("machine", "gpu"))
    tokens = "-" if row["tokens"] is None else format_si(row["tokens"])
    memory = format_size(row["peak_bytes"]) if row["gpu"] else ""
    if row["gpu"] and not find_gpu(row["gpu"]).holds(row["peak_bytes"]):
        memory += " (too large)"
    return {
        "run": row["label"],
        "state": row["state"],
        "time": about + _time(row["seconds"]),
        "step ms": f"{1000 * probe['step_seconds']:,.1f}" if probe else "",
        "tok/s": format_si(per_step / probe["step_seconds"]) if probe else "",
        "memory": memory,
        "params": f"{row['parameters']:,}",
        # The title of a combination repeats the name of its runs.
        "title": run.variant.title if plan.ablation else "",
        "tokens": tokens + (f" (x {row['stretch']:g})" if row["stretch"] != 1.0 else ""),
        "FLOP/token": format_si(row["flops_per_token"]),
        "ratio": row["ratio"],
        "pairs": f"{row['pairs_per_token']:.0f}",
        "reads": str(row["reads"]),
        "widths": row["widths"],
        "delta": row["delta"],
    }


def status_text(plan: Plan, rows: Sequence[Row], width: int | None = None) -> str:
    """Format the progress of each run as columns, and a summary of at most ``width`` columns."""
    lines = [("run", "state", "iteration", "time left")]
    running: dict[str, list[str]] = {}
    for row in rows:
        total = f"/{row['iterations']:,}" if row["iterations"] else ""
        iteration = f"{row['iteration']:,}{total}"
        lines.append((row["label"], row["state"], iteration, _time(row["seconds_left"])))
        if row["holder"]:
            running.setdefault(row["holder"], []).append(row["label"])
    holders = [f"{visible(holder)}: {', '.join(labels)}" for holder, labels in running.items()]
    notes = [*_state_notes(plan, rows), _look_note(plan), *(holders if len(running) > 1 else ())]
    return _text(lines, [*notes, summary_line(plan, rows)], width)


def _text(lines: Sequence[Sequence[str]], notes: Sequence[str], width: int | None) -> str:
    """Format left-aligned columns, most of which mix names and figures, and the notes below."""
    table = "".join(f"{line}\n" for line in text_lines(lines))
    return f"{table}\n" + folded("\n".join(filter(None, notes)), width, _INDENT)


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _state_notes(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return a line for each damaged run, and what changed since the stale ones were made."""
    notes = [
        f"{run.path}: {visible(row['problem'])}; type: make rerun RUNS={run.path.name}"
        for run, row in zip(plan.runs, rows, strict=True)
        if row["problem"]
    ]
    if changes := {row["label"]: row["changes"] for row in rows if row["state"] == "stale"}:
        notes += [f"stale: {visible(stale_text(changes))}", f"{_INDENT}{STALE_ADVICE}"]
    return notes


def _model_notes(plan: Plan) -> list[str]:
    return note_lines((run.label, run.config) for run in plan.runs)


def _time_notes(plan: Plan, rows: Sequence[Row]) -> list[str]:
    """Return the sources of the time estimates, and a warning if they are inaccurate or missing."""
    unmeasured = (f"{row['label']}: {row['unmeasured']}" for row in rows if row["unmeasured"])
    notes = list(dict.fromkeys(unmeasured))
    sources = {row["seconds_from"] for row in rows}
    if probes := [row["probe"] for row in rows if row["probe"]]:
        models, steps = len({*map(id, probes)}), min(probe["timed_steps"] for probe in probes)
        measured = f"measured on {probes[0]['device']}: {models} models, each alone"
        notes.append(f"{measured}, medians of at least {steps} steps")
    elif "machine" in sources:
        guess = "~ estimated from this CPU's matrix product speed, within a factor of two"
        notes.append(f"{guess}; make plan PROBE=1 measures it")
    elif gpu := rows[0]["gpu"]:
        share = f"at {100 * GPU_SHARE:.0f} % of the peak of {gpu}, within a factor of two"
        slower = "; - attention that reaches less" * ("unknown" in sources)
        notes.append(f"~ {share}{slower}; make plan PROBE=1 measures it on the card")
    elif "unknown" in sources:
        advice = "make plan PROBE=1 measures it, GPU=h100 estimates it for a GPU"
        notes.append(f"- unknown until a run was timed; {advice}")
    if plan.base.numerics.detect_anomaly:
        notes.append("DETECT_ANOMALY=y is slow: do not use these runs for speed claims")
    return notes


def _look_note(plan: Plan) -> str:
    """Return a line on the looks of SEEDS=auto; "" with a list of seeds."""
    auto = plan.auto
    if auto is None:
        return ""
    if not auto.looks:
        return f"no look left after {auto.last} seeds: nothing more is trained"
    later = f"at most {auto.most_later_runs} more runs, until {auto.looks[-1]} seeds"
    return f"look {auto.number} at {auto.looks[0]} seeds; then {later}"


def summary_line(plan: Plan, rows: Sequence[Row]) -> str:
    """Summarize the plan: ``ratio study (paper_repro), 19 x 3 seeds, 57 runs, 41 done, …``."""
    variants = len({run.variant.slug for run in plan.runs})
    name = _STUDY_NAMES.get(plan.study, f"{plan.study} study")
    parts = [
        f"{name} ({plan.base.repro.profile})",
        f"{variants} x {count(len(plan.seeds), 'seed')}",
        count(len(rows), "run"),
    ]
    for state in (*_DONE, "failed", "running", "damaged"):
        number = sum(row["state"] == state for row in rows)
        parts += [f"{number} {state}"] if number or state == "done" else []
    left = [row["seconds_left"] for row in rows if row["state"] not in _DONE]
    if left and None not in left:
        machine, jobs = plan.base.machine, plan.base.study.jobs
        if not jobs:
            # As many as fit the cores or the GPUs of this machine.
            on_cpu = machine.device == "cpu"
            units = usable_cores() // machine.cpu_threads if on_cpu else count_gpus()
            jobs = units // plan.base.train.gpus
        jobs = min(len(left), max(1, jobs))
        parts.append(f"about {format_duration(sum(left) / jobs)} of training left with JOBS={jobs}")
    return ", ".join(parts)


def to_json(plan: Plan, rows: Sequence[Row]) -> str:
    """Format the plan as one JSON document with sorted keys."""
    auto = plan.auto
    document = {
        "study": plan.study,
        "folder": str(plan.folder),
        "debug_flags": plan.base.numerics.debug_flags,
        "notes": _model_notes(plan),
        "left_out": [str(problem) for problem in plan.left_out],
        "micro_batch": asdict(plan.micro_batch) if plan.micro_batch else None,
        "power": study_power(plan, [row["seconds"] for row in rows]),
        "looks": auto
        and {
            "next": auto.number,
            "seeds": auto.looks,
            "most_later_runs": auto.most_later_runs,
            "open_variants": auto.open_variants,
        },
        "runs": rows,
    }
    return json_document(SCHEMA_VERSION, document)
