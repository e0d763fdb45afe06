"""View of a plan: state, size, speed and remaining time of each run, as text and JSON.

Reads configurations and run directories. Imports no torch.
"""

import contextlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gpt2.config import Config
from gpt2.model_config import ModelConfig
from gpt2.study.cost import (
    GPU_SHARE,
    ProbedStep,
    RunEstimate,
    estimates_by_probe,
    estimates_from_runs,
    estimates_on_gpu,
    evaluations,
)
from gpt2.study.looks import AutoSeeds
from gpt2.study.notes import note_lines
from gpt2.study.plan import Plan
from gpt2.study.power import power_text, study_cost, study_power
from gpt2.training.budget import TrainingBudget, run_budget
from lib.console import folded
from lib.env.gpu import cpu_model, find_gpu, usable_cores
from lib.errors import visible
from lib.json_files import RecordError
from lib.report.render import (
    fitting_rows,
    json_document,
    text_lines,
)
from lib.runner.queue import STALE_ADVICE, stale_text
from lib.runs.code import TreeDigests, run_drift
from lib.runs.lease import current_holder
from lib.runs.record import UNKNOWN, RunRecord, RunTiming
from lib.runs.rows import TimingRow
from lib.runs.run import Run, RunVariant
from lib.runs.run_dir import RunDir, State
from lib.units import format_duration, format_si, format_size

SCHEMA_VERSION = 1
# Of a continued line.
_INDENT = " " * 8
_STUDY_NAMES = {"single": "one training", "matrix": "test matrix"}


@dataclass(frozen=True)
class ModelSizes:
    """Sizes and cost of a model."""

    parameters: int
    # MLP parameters / attention parameters of the first and the last block.
    ratio: str
    # Hidden units and mechanism widths of the first and the last block.
    widths: str
    flops_per_token: float
    # Query-key pairs per token and head: mean over a context, and keys read by the last token.
    pairs_per_token: float
    reads: int


@dataclass(frozen=True)
class RunView(ModelSizes):
    """Cost and progress of one planned run. Times are in seconds, None if unknown."""

    label: str
    delta: str
    # None with a time budget.
    tokens: int | None
    # Multiple of the configured budget that the run trains for by design.
    stretch: float
    # Training time only, without start-up; with evaluations if a probe measured them.
    seconds: float | None
    # Source of ``seconds``: measured (the run is done), configured (a time budget), or that of a
    # RunEstimate.
    seconds_from: str
    # The GPU that the plan was asked for, and the tensors of a step on it at their peak.
    gpu: str
    peak_bytes: int | None
    probe: ProbedStep | None
    # Why the run could not be probed, else "".
    unmeasured: str
    # None with a time budget.
    evaluations: int | None
    seconds_left: float | None
    # done, stale, new, running, interrupted, failed, damaged
    state: str
    # Source files, torch version and device that changed since a stale run was made.
    changes: Sequence[str]
    # Reason of a damaged state, else "".
    problem: str
    # Machine, process and SLURM job that train a running run, else "".
    holder: str
    iteration: int
    iterations: int


def look(plan: Plan, gpu: str = "", probe: bool = False) -> list[RunView]:
    """Return a view of every run of the plan, in order.

    With the name of a ``gpu``, time and memory of runs that are not done are estimated for it; with
    ``probe``, steps of each model are timed on this machine. Raises ConfigError if the GPU is unknown,
    and PreflightError if a probe lacks its device.
    """
    models = {id(run.config.model): run.config.model for run in plan.runs}
    sizes_by_model = {key: _model_sizes(model) for key, model in models.items()}
    sizes = [sizes_by_model[id(run.config.model)] for run in plan.runs]
    records = [RunRecord(RunDir(run.path)) for run in plan.runs]
    tree = TreeDigests()
    states = [_state(*pair, tree) for pair in zip(plan.runs, records, strict=True)]
    timings = [_timing(record) for record in records]
    if probe:
        runs = [(run.label, run.config) for run in plan.runs]
        estimates = estimates_by_probe(runs, plan.build_dir)
    elif gpu:
        estimates = estimates_on_gpu([run.config for run in plan.runs], gpu)
    else:
        estimates = estimates_from_runs(plan.base, _speeds(sizes, timings), len(plan.runs))
    views = zip(plan.runs, sizes, records, states, timings, estimates, strict=True)
    return [_view(*view) for view in views]


def _speeds(sizes: Sequence[ModelSizes], timings: Sequence[RunTiming | None]) -> list[float]:
    """Return the FLOP/s of the timed runs."""
    pairs = zip(timings, sizes, strict=True)
    return [t.tokens_per_second * size.flops_per_token for t, size in pairs if t is not None]


# Columns of the plan, the most important first; a terminal shows those that fit, V=1 all.
_PRIORITY = (
    *("run", "state", "time", "step ms", "tok/s", "memory", "params", "title"),
    *("tokens", "FLOP/token", "ratio", "pairs", "reads", "widths", "delta"),
)


def plan_text(plan: Plan, views: Sequence[RunView], width: int | None = None) -> str:
    """Format the plan as columns of at most ``width`` characters, and a summary line."""
    columns: dict[str, Sequence[str]] = {
        "run": [view.label for view in views],
        "params": [f"{view.parameters:,}" for view in views],
        "ratio": [view.ratio for view in views],
        "widths": [view.widths for view in views],
        "FLOP/token": [format_si(view.flops_per_token) for view in views],
        "pairs": [f"{view.pairs_per_token:.0f}" for view in views],
        "reads": [str(view.reads) for view in views],
        "tokens": [_tokens(view) for view in views],
        "time": ["~" * (v.seconds_from in ("machine", "gpu")) + _time(v.seconds) for v in views],
        **_estimate_columns(plan, views),
        "state": [view.state for view in views],
        "title": [run.variant.title for run in plan.runs],
        "delta": [view.delta for view in views],
    }
    if len({view.pairs_per_token for view in views}) == 1:
        del columns["pairs"], columns["reads"]
    # The title of a combination repeats the name of its runs.
    if plan.ablation is None:
        del columns["title"]
    lines = fitting_rows(columns, [name for name in _PRIORITY if name in columns], width)
    skipped = "".join(f"skipped  {problem}\n" for problem in plan.left_out)
    power = power_text(study_power(plan), study_cost(plan, [view.seconds for view in views]))
    notes = (
        f"{skipped}{_damage_note(plan, views)}{_stale_note(views)}"
        + "".join(f"{line}\n" for line in _pattern_notes(plan))
        + f"{_time_note(plan, views)}{_debug_note(plan)}{_look_note(plan)}"
        + f"{_micro_batch_note(plan)}{power}{summary_line(plan, views)}"
    )
    if hidden := [name for name in columns if name not in lines[0]]:
        notes = f"not shown: {', '.join(hidden)} (V=1 shows all columns)\n{notes}"
    return f"{_columns(lines)}\n{folded(notes, width, _INDENT)}"


def _estimate_columns(plan: Plan, views: Sequence[RunView]) -> dict[str, list[str]]:
    """Return the columns of measured steps, and of the memory on a GPU; none if there is neither."""
    columns = {}
    if any(view.probe for view in views):
        milliseconds = [1000 * v.probe.step_seconds if v.probe else None for v in views]
        tokens = [
            run.config.train.tokens_per_iteration(run.config.model.shape.block_size)
            for run in plan.runs
        ]
        columns["step ms"] = ["-" if ms is None else f"{ms:,.1f}" for ms in milliseconds]
        columns["tok/s"] = [
            "-" if ms is None else format_si(1000 * n / ms)
            for n, ms in zip(tokens, milliseconds, strict=True)
        ]
    if any(view.gpu for view in views):
        columns["memory"] = [_memory(view) for view in views]
    return columns


def _memory(view: RunView) -> str:
    assert view.peak_bytes is not None
    fits = find_gpu(view.gpu).holds(view.peak_bytes)
    return f"{format_size(view.peak_bytes)}{'' if fits else ' (too large)'}"


def status_text(plan: Plan, views: Sequence[RunView], width: int | None = None) -> str:
    """Format the progress of each run as columns, and a summary of at most ``width`` columns."""
    lines = [("run", "state", "iteration", "time left")]
    for view in views:
        total = f"/{view.iterations:,}" if view.iterations else ""
        lines.append(
            (view.label, view.state, f"{view.iteration:,}{total}", _time(view.seconds_left))
        )
    notes = f"{_damage_note(plan, views)}{_stale_note(views)}{_look_note(plan)}"
    notes += f"{_holder_note(views)}{summary_line(plan, views)}"
    return f"{_columns(lines)}\n{folded(notes, width, _INDENT)}"


def _holder_note(views: Sequence[RunView]) -> str:
    """Return who trains which runs, if there is more than one process, else ""."""
    running: dict[str, list[str]] = {}
    for view in views:
        if view.holder:
            running.setdefault(view.holder, []).append(view.label)
    if len(running) < 2:
        return ""
    return "".join(
        f"{visible(holder)}: {', '.join(labels)}\n" for holder, labels in running.items()
    )


def _damage_note(plan: Plan, views: Sequence[RunView]) -> str:
    """Return a line for each damaged run: the folder, the damage, and the command that helps."""
    return "".join(
        f"{run.path}: {visible(view.problem)}; type: make rerun RUNS={run.path.name}\n"
        for run, view in zip(plan.runs, views, strict=True)
        if view.problem
    )


def _stale_note(views: Sequence[RunView]) -> str:
    """Return what changed since the stale runs were made, once for the study."""
    changes = {view.label: view.changes for view in views if view.state == "stale"}
    return f"stale: {visible(stale_text(changes))}\n        {STALE_ADVICE}\n" if changes else ""


def summary_line(plan: Plan, views: Sequence[RunView]) -> str:
    """Summarize the plan: ``ratio study (paper_repro), 19 x 3 seeds, 57 runs, 41 done, …``."""
    variants = len({run.variant.slug for run in plan.runs})
    seeds = len({run.seed for run in plan.runs})
    name = _STUDY_NAMES.get(plan.study, f"{plan.study} study")
    parts = [
        f"{name} ({plan.base.repro.profile})",
        f"{variants} x {seeds} seed{'s' * (seeds > 1)}",
        f"{len(views)} run{'s' * (len(views) != 1)}",
    ]
    counts = {
        state: sum(v.state == state for v in views)
        for state in ("done", "stale", "failed", "running", "damaged")
    }
    parts += [f"{count} {state}" for state, count in counts.items() if count or state == "done"]
    remaining = [view.seconds_left for view in views if view.state not in ("done", "stale")]
    estimates = [seconds for seconds in remaining if seconds is not None]
    if remaining and len(estimates) == len(remaining):
        jobs = min(len(remaining), _jobs(plan.base))
        parts.append(
            f"about {format_duration(sum(estimates) / jobs)} of training left with JOBS={jobs}"
        )
    return ", ".join(parts)


def to_json(plan: Plan, views: Sequence[RunView]) -> str:
    """Format the plan as one JSON document with sorted keys."""
    document = {
        "study": plan.study,
        "folder": str(plan.folder),
        "debug_flags": plan.base.numerics.debug_flags,
        "notes": _pattern_notes(plan),
        "left_out": [str(problem) for problem in plan.left_out],
        "micro_batch": asdict(plan.micro_batch) if plan.micro_batch else None,
        "power": study_power(plan),
        "cost": study_cost(plan, [view.seconds for view in views]),
        "looks": None if plan.auto is None else _looks(plan.auto),
        "runs": [
            asdict(view) | {"directory": str(run.path), "seed": run.seed}
            for run, view in zip(plan.runs, views, strict=True)
        ],
    }
    return json_document(SCHEMA_VERSION, document)


def _time_note(plan: Plan, views: Sequence[RunView]) -> str:
    """Return the sources of the time estimates, and a warning if they are inaccurate or missing."""
    lines = dict.fromkeys(f"{view.label}: {view.unmeasured}" for view in views if view.unmeasured)
    sources = {view.seconds_from for view in views}
    if probes := [view.probe for view in views if view.probe]:
        lines[_probe_note(plan, views, probes)] = None
    elif "machine" in sources:
        guess = "~ estimated from this CPU's matrix product speed, within a factor of two"
        lines[f"{guess}; make plan PROBE=1 measures it"] = None
    elif gpu := views[0].gpu if views else "":
        share = f"at {100 * GPU_SHARE:.0f} % of the peak of {gpu}, within a factor of two"
        slower = "; - attention that reaches less" * ("unknown" in sources)
        lines[f"~ {share}{slower}; make plan PROBE=1 measures it on the card"] = None
    elif "unknown" in sources:
        advice = "make plan PROBE=1 measures it, GPU=h100 estimates it for a GPU"
        lines[f"- unknown until a run was timed; {advice}"] = None
    return "".join(f"{line}\n" for line in lines)


def _probe_note(plan: Plan, views: Sequence[RunView], probes: Sequence[ProbedStep]) -> str:
    """Return what was measured on which device, and the time of all runs."""
    models, steps = len(set(probes)), min(probe.timed_steps for probe in probes)
    text = f"measured on {probes[0].device}: {models} models, each alone, medians of {steps} steps"
    counts = [run.config.train.grad_accumulation for run in plan.runs]
    if any(v.probe and v.probe.timed_micro_batches < n for v, n in zip(views, counts, strict=True)):
        text += ", extrapolated from two micro-batches"
    probed = [v.seconds for v in views if v.seconds_from == "probe" and v.seconds is not None]
    return f"{text}; {format_duration(sum(probed))} for {len(probed)} runs with their evaluations"


def _micro_batch_note(plan: Plan) -> str:
    return f"{plan.micro_batch}\n" if plan.micro_batch else ""


def _pattern_notes(plan: Plan) -> list[str]:
    return note_lines((run.label, run.config) for run in plan.runs)


def _look_note(plan: Plan) -> str:
    """Return a line on the looks of SEEDS=auto; "" with a list of seeds."""
    auto = plan.auto
    if auto is None:
        return ""
    if not auto.looks:
        return f"no look left after {auto.last} seeds: nothing more is trained\n"
    later = f"at most {auto.most_later_runs} more runs, until {auto.looks[-1]} seeds"
    return f"look {auto.number} at {auto.looks[0]} seeds; then {later}\n"


def _looks(auto: AutoSeeds) -> dict[str, Any]:
    return {
        "next": auto.number,
        "seeds": list(auto.looks),
        "most_later_runs": auto.most_later_runs,
        "open_variants": auto.open_variants,
    }


def _debug_note(plan: Plan) -> str:
    """Return a warning if a debug setting slows the runs down."""
    if not plan.base.numerics.detect_anomaly:
        return ""
    return "DETECT_ANOMALY=y is slow: do not use these runs for speed claims\n"


def _model_sizes(model: ModelConfig) -> ModelSizes:
    ratio, widths = _ratio_and_widths(model)
    return ModelSizes(
        parameters=model.num_params(),
        ratio=ratio,
        widths=widths,
        flops_per_token=model.flops_per_token(),
        pairs_per_token=model.pairs_per_token(),
        reads=model.reads(),
    )


def _view(
    run: Run[Config],
    sizes: ModelSizes,
    record: RunRecord,
    state_and_reason: tuple[str, str, Sequence[str]],
    timing: RunTiming | None,
    estimate: RunEstimate,
) -> RunView:
    config, (state, problem, changes) = run.config, state_and_reason
    budget = run_budget(config)
    tokens = None if budget.is_time else budget.iterations * budget.tokens_per_iteration
    done = state in ("done", "stale")
    flops = sizes.flops_per_token
    seconds, source = timing.train_seconds if timing and done else None, "measured"
    if seconds is None and tokens is None:
        seconds, source = budget.seconds, "configured"
    elif seconds is None and tokens is not None:
        source, flops_per_second = estimate.source, estimate.flops_per_second
        seconds = tokens * flops / flops_per_second if flops_per_second else None
        if estimate.probe:
            seconds = estimate.probe.run_seconds(config)
    # The status of a running run has the iteration of its last checkpoint.
    latest = _last_timing(record) if state == "running" else None
    saved = record.status.iteration if record.status else 0
    iteration = max(saved, latest.iteration if latest else 0)
    begun = record.status.written_at if record.status else 0.0
    left = 0.0 if done else _seconds_left(latest, begun, seconds, iteration, budget)
    return RunView(
        label=run.label,
        delta=_describe_delta(run.variant),
        **vars(sizes),
        tokens=tokens,
        stretch=budget.stretch,
        seconds=seconds,
        seconds_from=source,
        gpu=estimate.gpu,
        peak_bytes=estimate.peak_bytes,
        probe=estimate.probe,
        unmeasured=estimate.unmeasured,
        evaluations=None if budget.is_time else evaluations(config),
        seconds_left=left,
        state=state,
        changes=changes,
        problem=problem,
        holder=str(current_holder(record.run) or "") if state == "running" else "",
        iteration=iteration,
        iterations=budget.iterations,
    )


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
    changes = run_drift(record, _device(run.config), tree)
    return "stale" if changes else record.state, "", changes


def _timing(record: RunRecord) -> RunTiming | None:
    """Return the speed of a run; None if it has none that can be read."""
    try:
        return record.timing if record.is_done else None
    except RecordError:
        return None


def _device(config: Config) -> str | None:
    """Return the model of the CPU, None for a GPU, whose model cannot be read without torch."""
    return cpu_model() if config.machine.device == "cpu" else None


def _jobs(config: Config) -> int:
    """Return the number of concurrent runs: JOBS, or on a CPU as many as fit its cores.

    GPUs cannot be counted without importing torch.
    """
    if config.study.jobs or config.machine.device != "cpu":
        return max(1, config.study.jobs)
    return max(1, usable_cores() // config.machine.cpu_threads)


def _describe_delta(variant: RunVariant) -> str:
    """Format parent and changes: ``golden + MLP_ATTN_GATE MLP_SHARE=0.15`` (a bare name is y)."""
    settings = (variant.delta or {}).items()
    changes = " ".join(name if value is True else f"{name}={value}" for name, value in settings)
    return f"{variant.parent} + {changes}" if variant.parent else changes


def _ratio_and_widths(model: ModelConfig) -> tuple[str, str]:
    """Format ratio and widths of the first and the last block, joined by / if they differ."""
    mlp, sites = model.mlp, model.sites()
    ends = [sites[0], sites[-1]]
    ratio = _joined([f"{mlp.built_ratio(site):.3f}" for site in ends])
    sizes = [mlp.size(site) for site in ends]
    widths = [f"M {_joined([str(size.hidden) for size in sizes])}"]
    for mechanism in (m for m in mlp.mechanisms if m.sized):
        values = [str(size.widths.get(mechanism.name, "-")) for size in sizes]
        widths.append(f"{mechanism.name.removeprefix('mlp_')} {_joined(values)}")
    return ratio, " ".join(widths)


def _joined(values: Sequence[str]) -> str:
    return "/".join(dict.fromkeys(values))


def _seconds_left(
    latest: TimingRow | None,
    begun: float,
    seconds: float | None,
    iteration: int,
    budget: TrainingBudget,
) -> float | None:
    """Return the remaining training time: the ETA of a running run's latest line, else an estimate.

    The line of a resumed run was written before it stopped: since then, the run is trained again
    from ``begun``, when its status was written.
    """
    if latest is not None and latest.eta_seconds is not None:
        return max(0.0, latest.eta_seconds - (time.time() - max(latest.written_at, begun)))
    if seconds is None:
        return None
    return seconds * (1 - iteration / budget.iterations) if budget.iterations else seconds


def _last_timing(record: RunRecord) -> TimingRow | None:
    """Return the last complete line of timing.jsonl; None if there is none."""
    try:
        return record.timings[-1]
    except (RecordError, IndexError):
        return None


def _tokens(view: RunView) -> str:
    tokens = "-" if view.tokens is None else format_si(view.tokens)
    return tokens if view.stretch == 1.0 else f"{tokens} (x {view.stretch:g})"


def _time(seconds: float | None) -> str:
    return "-" if seconds is None else format_duration(seconds)


def _columns(lines: Sequence[Sequence[str]]) -> str:
    """Format left-aligned columns; most columns mix names and figures."""
    return "".join(f"{line}\n" for line in text_lines(lines))
