"""Mechanism statistics during training, without effect on its results.

Measured in a separate forward pass, without gradients and in evaluation mode, on the first training
sequences of the seed's order: the same text at every iteration and in every run of a study.
"""

import math
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.data.sampler import TrainSampler
from gpt2.mechanism_statistics import StatisticsByLayer, collect_statistics
from gpt2.model import GPT
from gpt2.training.budget import remaining_seconds
from gpt2.training.nonfinite import require_finite
from gpt2.training.session import StepMetrics, TrainingSession
from lib.env.gpu import peak_tflops
from lib.env.hardware import device_name
from lib.env.machine import autocast
from lib.runs.rows import HeartbeatRow, TrainRow
from lib.tracking import watch
from lib.tracking.reader import reduce_over_layers
from lib.tracking.stability import StabilityMonitor, instability_text
from lib.tracking.watch import WatchedRecords, read_watched_records, scaled_span


def statistics_due(session: TrainingSession) -> bool:
    """Return whether statistics are due: at the end of an interval or of training, once each."""
    interval = session.config.telemetry.statistics_interval
    if not interval or session.state.iteration == session.state.statistics_at:
        return False
    return session.state.iteration % interval == 0 or session.state.progress >= 1.0


def record_statistics(session: TrainingSession) -> None:
    """Append statistics to metrics.jsonl and the heartbeat, on rank 0 only."""
    session.state.statistics_at = session.state.iteration
    model = session.state.whole_model()
    if not session.group.is_main:
        return
    try:
        values = _measure(session, model)
    except torch.OutOfMemoryError:
        rows = session.config.telemetry.statistics_rows
        what = f"no statistics at iteration {session.state.iteration}: out of memory"
        session.records.line("WARN", f"{what}; reduce STATISTICS_ROWS={rows}")
        return
    session.records.metrics(
        kind="statistics",
        iteration=session.state.iteration,
        tokens=session.state.tokens,
        values=values,
    )
    session.heartbeat.beat(
        "statistics",
        session.state.iteration,
        statistics=reduce_over_layers(values),
        **_watched(values),
    )


def _measure(session: TrainingSession, model: GPT) -> StatisticsByLayer:
    training = model.training
    model.eval()
    gpus = [session.device] if session.device.type == "cuda" else []
    try:
        with torch.random.fork_rng(gpus), autocast(session.config.machine):
            return collect_statistics(model, _statistics_sequences(session))
    finally:
        model.train(training)


def _statistics_sequences(session: TrainingSession) -> Tensor:
    """Return the first STATISTICS_ROWS training sequences [B, T]."""
    length = session.config.model.shape.block_size
    sampler = TrainSampler(session.dataset.train, length, session.config.seed)
    windows = sampler.sequences(0, session.config.telemetry.statistics_rows)
    return torch.from_numpy(windows[:, :-1]).to(session.device)


def _watched(values: StatisticsByLayer) -> dict[str, Any]:
    """Return the inputs of the watch rules: gates over branches, of the worst layer."""
    entropies, largest = (_with_suffix(values, end) for end in ("/gate_entropy", "/gate_largest"))
    gates = {"gate_entropy": min(entropies)} if entropies else {}
    return gates | ({"gate_max": max(largest)} if largest else {})


def _with_suffix(values: StatisticsByLayer, suffix: str) -> list[float]:
    """Return the values of all mechanisms and layers whose name ends with ``suffix``."""
    matches = [layers for name, layers in values.items() if name.endswith(suffix)]
    return [value for layers in matches for value in layers if value is not None]


# Model FLOPs utilisation (MFU): the share of the devices' peak FLOP/s that training uses.
#
# Model FLOPs are counted as forward plus twice that for backward, at full context, with the attended
# pairs only. Recomputation to save memory is not counted (Chowdhery et al. 2022, arXiv 2204.02311,
# appendix B; the paper counts all pairs of attention).


_TERA = 1e12


def peak_flops(session: TrainingSession) -> float | None:
    """Return the peak FLOP/s of all devices of the run; log a line and return None if unknown."""
    machine, tflops = session.config.machine, session.config.telemetry.peak_tflops
    name = device_name(session.device)
    if tflops is None and session.device.type == "cuda":
        tflops = peak_tflops(name, machine.precision, machine.matmul_precision)
    if tflops is None:
        what = f"no MFU: unknown {machine.precision} peak of {name}"
        session.records.log("TRAIN", f"{what}; set PEAK_TFLOPS")
        return None
    return tflops * _TERA * session.group.size


def mfu(
    session: TrainingSession, tokens_per_second: float, peak_flops: float | None
) -> float | None:
    """Return the MFU of all devices together, from 0 to 1; None if their peak is unknown."""
    if peak_flops is None:
        return None
    return session.config.model.flops_per_token() * tokens_per_second / peak_flops


# Health check of a run's first steps, based on its records: loss, gradients, gates, speed.


# Log intervals excluded for compilation and the allocator's growth.
_STARTUP_INTERVALS = 2
_MIN_INTERVALS = 5
# A note, no failure of the run: other programs slow it down too.
_NOTE = "speed"


@dataclass(frozen=True)
class HealthCheckResult:
    """Result of the health check of the first ``steps`` steps."""

    steps: int
    # Criterion → whether it passed, and a description; criteria without data are absent.
    found: Mapping[str, tuple[bool, str]]

    @property
    def passed(self) -> bool:
        """Return whether all criteria of the run passed."""
        return not self.failed

    @property
    def failed(self) -> dict[str, str]:
        """Return the criteria of the run that failed, and their descriptions."""
        return {name: text for name, (ok, text) in self.found.items() if not ok and name != _NOTE}

    @property
    def text(self) -> str:
        """Return one line with the failed criteria, or with all criteria if none failed."""
        if self.failed:
            return f"first {self.steps:,} it failed: {', '.join(self.failed.values())}"
        # The note is last.
        criteria = sorted(self.found.items(), key=lambda item: item[0] == _NOTE)
        texts = [text if ok else f"{text}, as if other programs ran" for _, (ok, text) in criteria]
        return f"first {self.steps:,} it passed: {', '.join(texts)}"

    def record(self) -> dict[str, Any]:
        """Return the result as plain JSON for the summary."""
        criteria = {
            name: {"passed": passed, "found": text} for name, (passed, text) in self.found.items()
        }
        return {"steps": self.steps, "passed": self.passed, "criteria": criteria}


def log_health_check(session: TrainingSession) -> None:
    """Log the result with the first log line after the first steps.

    Only failed criteria are shown on the terminal, without the unstable steps that it already has.
    """
    now, interval = session.state.iteration, session.config.train.log_interval
    # Also in a run that was interrupted since the line before.
    before = (now - 1) // interval * interval
    if session.group.is_main and before < first_steps(session) <= now:
        verdict = check_first_steps(session)
        assert verdict
        write = (
            session.records.line if verdict.failed.keys() - {"stability"} else session.records.log
        )
        write("WARN" if verdict.failed else "FIRST", verdict.text)


def first_steps(session: TrainingSession) -> int:
    """Return the number of first steps, limited to a share of the run; 0 disables the check."""
    return scaled_span(session.config.train.first_steps, session.state.budget.iterations)


def check_first_steps(session: TrainingSession) -> HealthCheckResult | None:
    """Check the recorded first steps; None before their end, or if the check is disabled."""
    steps = first_steps(session)
    if not 0 < steps <= session.state.iteration:
        return None
    facts = read_watched_records(session.run, time.time())
    return evaluate_criteria(facts, session.config, steps)


def evaluate_criteria(facts: WatchedRecords, config: Config, steps: int) -> HealthCheckResult:
    """Check loss, stability, gradients, gates, speed and memory of the first ``steps`` steps."""
    rows = [row for row in facts.train if row.iteration <= steps]
    # Steps repeated after a resume have two heartbeats.
    beats = [beat for beat in facts.beats if beat.step <= steps]
    unstable = [step for step in facts.unstable if step.iteration <= steps]
    early = WatchedRecords(facts.status, facts.now, {0: beats}, rows, (), unstable)
    criteria = {
        "loss": _loss(rows, config),
        "stability": (not unstable, instability_text(unstable) or "no jumps"),
        "gradients": _gradients(rows),
        "gates": _gates(early),
        "speed": _speed(beats, config.train.first_steps_speed),
        "memory": _memory(early),
    }
    return HealthCheckResult(steps, {name: result for name, result in criteria.items() if result})


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


def _gates(facts: WatchedRecords) -> tuple[bool, str] | None:
    """Check the gates by the rules of make watch; None without gates over branches."""
    if all(beat.gate_entropy is None for beat in facts.beats):
        return None
    gate_rules = (watch.gate_entropy, watch.gate_max)
    warnings = [warning for rule in gate_rules if (warning := rule(facts))]
    return not warnings, ", ".join(warnings) or "gates open"


def _memory(facts: WatchedRecords) -> tuple[bool, str] | None:
    """Check the growth of memory by the rule of make watch; None with too few log intervals."""
    if len(facts.beats) < _STARTUP_INTERVALS + _MIN_INTERVALS:
        return None
    growth = watch.memory_creep(facts)
    return not growth, growth or f"memory steady at {facts.beats[-1].mem_reserved_mib:,.0f} MiB"


def _speed(beats: Sequence[HeartbeatRow], percent: int) -> tuple[bool, str] | None:
    """Check that the speed is steady from the third log interval on; None if there are too few."""
    speeds = [beat.toks_per_s for beat in beats if beat.toks_per_s is not None]
    if len(speeds) < _STARTUP_INTERVALS + _MIN_INTERVALS:
        return None
    typical = median(speeds[_STARTUP_INTERVALS:])
    deviation = max(abs(speed / typical - 1) for speed in speeds[_STARTUP_INTERVALS:])
    text = f"speed up to {100 * deviation:.0f} % off the median of {typical:,.0f} tok/s"
    return 100 * deviation <= percent, text


# Training log: a metrics row per iteration, and a log line per log interval.


class MetricsLog:
    """Buffer of step metrics still on the device; reading them synchronizes with the GPU."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        # Values known on the host, and metrics on the device, of each unwritten row.
        self._pending: deque[tuple[dict[str, float], StepMetrics]] = deque()
        # Losses since the last log line, and iteration and training seconds of that line.
        self._losses: list[float] = []
        self._grad_norm: float | None = None
        self._line_at = (session.state.iteration, session.state.clock.seconds)
        self._peak_flops = peak_flops(session)
        config = session.config
        self._stability = StabilityMonitor(
            config.schedule.warmup_steps, config.model.shape.vocab_size
        )
        self._stable = True

    def add(self, measured: StepMetrics, lr: float) -> None:
        """Add the metrics of the last step; write and log them at the end of the log interval."""
        session = self._session
        row = {
            "iteration": session.state.iteration,
            "tokens": session.state.tokens,
            "progress": session.state.progress,
            "lr": lr,
        }
        self._pending.append((row, measured))
        if (
            session.state.iteration % session.config.train.log_interval == 0
            or session.state.progress >= 1.0
        ):
            self.flush()
            self._line(lr)

    def flush(self) -> None:
        """Write all buffered rows. Raises NumericsError at the first non-finite row.

        A row depends neither on the log interval nor on where a run was interrupted.
        """
        values = [torch.stack((m.loss, m.gradient_norm)) for _, m in self._pending]
        for loss, norm in torch.stack(values).tolist() if values else []:
            row, measured = self._pending[0]
            require_finite(self._session, measured, int(row["iteration"]))
            # Non-finite only in fp16, when the scaler skipped a step that overflowed.
            self._grad_norm = norm if math.isfinite(norm) else None
            self._session.records.metrics(kind="train", **row, loss=loss, grad_norm=self._grad_norm)
            self._check_stability(int(row["iteration"]), loss)
            self._losses.append(loss)
            self._pending.popleft()

    def _check_stability(self, iteration: int, loss: float) -> None:
        """Log an unstable step; the first one is shown on the terminal too."""
        step = self._stability.check(iteration, loss, self._grad_norm)
        if step is None:
            return
        records = self._session.records
        write = records.line if self._stable else records.log
        write("WARN", instability_text([step]))
        self._stable = False

    def _line(self, lr: float) -> None:
        session = self._session
        iterations, seconds = (
            session.state.iteration - self._line_at[0],
            session.state.clock.seconds,
        )
        tokens = iterations * session.state.budget.tokens_per_iteration
        speed = tokens / max(seconds - self._line_at[1], 1e-9)
        utilisation = mfu(session, speed, self._peak_flops)
        loss = math.fsum(self._losses) / len(self._losses)
        eta = remaining_seconds(session.state.progress, seconds)
        session.records.timing(
            iteration=session.state.iteration,
            iterations=session.state.budget.iterations,
            train_seconds=seconds,
            tokens_per_second=speed,
            mfu=utilisation,
            eta_seconds=eta,
            **session.state.optimizer.statistics(),
        )
        session.records.progress(
            progress=session.state.progress,
            iteration=session.state.iteration,
            iterations=session.state.budget.iterations,
            loss=loss,
            lr=lr,
            grad_norm=self._grad_norm,
            tokens_per_second=speed,
            eta_seconds=eta,
        )
        norm = "overflow" if self._grad_norm is None else f"{self._grad_norm:.3f}"
        session.records.log(
            "TRAIN",
            f"{_position(session)}   loss {loss:.4f}   lr {lr:.3e}   grad norm {norm}   "
            f"{speed:,.0f} tok/s{'' if utilisation is None else f' ({utilisation:.1%} MFU)'}   "
            f"eta {format_duration(eta)}",
        )
        session.heartbeat.beat(
            "train",
            session.state.iteration,
            loss=loss,
            grad_norm=self._grad_norm,
            lr=lr,
            toks_per_s=speed,
            mfu=utilisation,
            eta_s=eta,
            fallbacks=len(session.state.oom_fallbacks),
        )
        log_health_check(session)
        session.sidecars.check()
        self._losses.clear()
        self._line_at = (session.state.iteration, seconds)


def format_duration(seconds: float | None) -> str:
    """Format seconds as ``mm:ss``, ``h:mm:ss`` from one hour on, or ``?`` if unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _position(session: TrainingSession) -> str:
    if session.state.budget.is_time:
        return f"it {session.state.iteration} ({session.state.progress:.1%})"
    return f"it {session.state.iteration}/{session.state.budget.iterations}"
