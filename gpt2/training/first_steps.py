"""Health check of a run's first steps, from its records: loss, gradients, gates, speed, memory."""

import math
import time
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

from gpt2.config import Config
from gpt2.training.state import TrainingSession
from lib.runs.rows import TrainRow
from lib.tracking.stability import instability_text
from lib.tracking.watch import (
    WatchedRecords,
    raised_alarms,
    read_watched_records,
    scaled_span,
)

# Log intervals excluded for compilation and the allocator's growth, and those that must remain.
_STARTUP_INTERVALS, _MIN_INTERVALS = 2, 5
_SPEED_PERCENT = 25
# A note, no failure of the run: other programs slow it down too.
_NOTE = "speed"
# Criterion → whether it passed, and a description; criteria without data are absent.
Criteria = dict[str, tuple[bool, str]]


def log_health_check(session: TrainingSession) -> None:
    """Log the result after the first steps; failed criteria are shown on the terminal too."""
    now, interval = session.iteration, session.config.train.log_interval
    # Also in a run that was interrupted since the line before.
    before = (now - 1) // interval * interval
    if session.group.is_main and before < first_steps(session) <= now:
        steps, criteria = first_steps(session), check_first_steps(session)
        failed = failed_criteria(criteria)
        write = session.records.line if set(failed) - {"stability"} else session.records.log
        write("WARN" if failed else "FIRST", criteria_text(steps, criteria))


def first_steps(session: TrainingSession) -> int:
    """Return the number of first steps, limited to a share of the run; 0 disables the check."""
    return scaled_span(session.config.train.first_steps, session.budget.iterations)


def summary_of_first_steps(session: TrainingSession) -> dict[str, Any] | None:
    """Return the result for the summary; None before the end of the first steps, or without any."""
    if not 0 < first_steps(session) <= session.iteration:
        return None
    criteria = check_first_steps(session)
    found = {name: {"passed": passed, "found": text} for name, (passed, text) in criteria.items()}
    passed = not failed_criteria(criteria)
    return {"steps": first_steps(session), "passed": passed, "criteria": found}


def check_first_steps(session: TrainingSession) -> Criteria:
    facts = read_watched_records(session.run, time.time())
    return evaluate_criteria(facts, session.config, first_steps(session))


def failed_criteria(criteria: Criteria) -> list[str]:
    return [name for name, (passed, _) in criteria.items() if not passed and name != _NOTE]


def criteria_text(steps: int, criteria: Criteria) -> str:
    """Return one line with the failed criteria, or with all criteria if none failed."""
    if failed := failed_criteria(criteria):
        return f"first {steps:,} it failed: {', '.join(criteria[name][1] for name in failed)}"
    # The note is last.
    ordered = sorted(criteria.items(), key=lambda item: item[0] == _NOTE)
    texts = [text if ok else f"{text}, as if other programs ran" for _, (ok, text) in ordered]
    return f"first {steps:,} it passed: {', '.join(texts)}"


def evaluate_criteria(facts: WatchedRecords, config: Config, steps: int) -> Criteria:
    """Check loss, stability, gradients, gates, speed and memory of the first ``steps`` steps."""
    rows = [row for row in facts.train if row.iteration <= steps]
    # Steps repeated after a resume have two heartbeats.
    beats = [beat for beat in facts.beats if beat.step <= steps]
    unstable = [step for step in facts.unstable if step.iteration <= steps]
    early = WatchedRecords(facts.status, facts.now, {0: beats}, rows, (), unstable)
    alarms = raised_alarms(early, config.telemetry.stall_seconds)
    criteria = {
        "loss": _loss(rows, config),
        "stability": (not unstable, instability_text(unstable) or "no jumps"),
        "gradients": _gradients(rows),
    }
    if any(beat.gate_entropy is not None for beat in beats):
        warnings = [alarms[name] for name in ("gate-entropy", "gate-max") if name in alarms]
        criteria["gates"] = not warnings, ", ".join(warnings) or "gates open"
    speeds = [beat.toks_per_s for beat in beats if beat.toks_per_s is not None]
    if len(speeds) >= _STARTUP_INTERVALS + _MIN_INTERVALS:
        typical = median(speeds[_STARTUP_INTERVALS:])
        percent = 100 * max(abs(speed / typical - 1) for speed in speeds[_STARTUP_INTERVALS:])
        text = f"speed up to {percent:.0f} % off the median of {typical:,.0f} tok/s"
        criteria["speed"] = percent <= _SPEED_PERCENT, text
    if len(beats) >= _STARTUP_INTERVALS + _MIN_INTERVALS:
        growth = alarms.get("memory-creep", "")
        steady = f"memory steady at {beats[-1].mem_reserved_mib:,.0f} MiB"
        criteria["memory"] = not growth, growth or steady
    return criteria


def _loss(rows: Sequence[TrainRow], config: Config) -> tuple[bool, str]:
    """Check that the loss is finite, below uniform guessing, and lower in the last tenth.

    Trained initial weights may start at a loss that the warm-up raises.
    """
    losses, uniform = [row.loss for row in rows], math.log(config.model.shape.vocab_size)
    part = max(1, len(losses) // 10)
    first, last = fmean(losses[:part]), fmean(losses[-part:])
    limit = uniform if config.init.init_from else min(first, uniform)
    passed = all(map(math.isfinite, losses)) and last < limit
    return passed, f"loss {first:.3f} to {last:.3f} (uniform {uniform:.3f})"


def _gradients(rows: Sequence[TrainRow]) -> tuple[bool, str]:
    """Check that gradient norms are never zero, and known for most steps (fp16 skips some)."""
    norms = [row.grad_norm for row in rows if row.grad_norm is not None]
    if not norms:
        return False, "no gradient norms"
    passed = min(norms) > 0.0 and 2 * len(norms) > len(rows)
    return passed, f"gradient norms {min(norms):.3f} to {max(norms):.3f} of {len(norms):,} steps"
