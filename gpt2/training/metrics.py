"""Measurements of a training: loss, speed and utilisation of each step, and mechanism statistics."""

import math
from typing import Any

import torch

from gpt2.mechanism_statistics import collect_statistics
from gpt2.training.first_steps import log_health_check
from gpt2.training.nonfinite import require_finite
from gpt2.training.state import StepMetrics, TrainingSession
from lib.env.gpu import peak_tflops
from lib.env.hardware import device_name
from lib.env.machine import autocast
from lib.tracking.reader import reduce_over_layers
from lib.tracking.stability import StabilityMonitor, instability_text
from lib.units import format_duration

_TERA = 1e12


class MetricsLog:
    """Rows of each iteration, and a line per log interval; reading them synchronizes with the GPU."""

    def __init__(self, session: TrainingSession) -> None:
        self._session = session
        # Values known on the host, and metrics on the device, of each unwritten row.
        self._pending: list[tuple[dict[str, Any], StepMetrics]] = []
        # Losses since the last log line, and iteration and training seconds of that line.
        self._losses: list[float] = []
        self._grad_norm: float | None = None
        self._line_at = (session.iteration, session.clock.seconds)
        self._first_progress = session.progress
        self._peak_flops = peak_flops(session)
        config = session.config
        self._stability = StabilityMonitor(
            config.schedule.warmup_steps, config.model.shape.vocab_size
        )
        self._stable = True

    def add(self, measured: StepMetrics, lr: float) -> None:
        """Add the metrics of the last step; write and log them at the end of the log interval."""
        session = self._session
        row: dict[str, Any] = {"iteration": session.iteration, "tokens": session.tokens}
        row |= {"progress": session.progress, "lr": lr}
        self._pending.append((row, measured))
        interval = session.config.train.log_interval
        if session.iteration % interval == 0 or session.progress >= 1.0:
            self.flush()
            self._line(lr)

    def flush(self) -> None:
        """Write all buffered rows. Raises NumericsError at the first non-finite row.

        A row depends neither on the log interval nor on where a run was interrupted.
        """
        values = [torch.stack((m.loss, m.gradient_norm)) for _, m in self._pending]
        records = self._session.records
        for loss, norm in torch.stack(values).tolist() if values else []:
            row, measured = self._pending[0]
            iteration = row["iteration"]
            require_finite(self._session, measured, iteration)
            # Non-finite only in fp16, when the scaler skipped a step that overflowed.
            self._grad_norm = norm if math.isfinite(norm) else None
            records.metrics(kind="train", **row, loss=loss, grad_norm=self._grad_norm)
            if step := self._stability.check(iteration, loss, self._grad_norm):
                # The first unstable step is shown on the terminal too.
                write = records.line if self._stable else records.log
                write("WARN", instability_text([step]))
                self._stable = False
            self._losses.append(loss)
            del self._pending[0]

    def _line(self, lr: float) -> None:
        """Write loss, speed, utilisation and remaining time of the steps since the last line."""
        session, records, budget = self._session, self._session.records, self._session.budget
        iteration, seconds = session.iteration, session.clock.seconds
        tokens = (iteration - self._line_at[0]) * budget.tokens_per_iteration
        speed = tokens / max(seconds - self._line_at[1], 1e-9)
        mfu = None
        if self._peak_flops is not None:
            mfu = session.config.model.flops_per_token() * speed / self._peak_flops
        loss = math.fsum(self._losses) / len(self._losses)
        # At the average speed.
        eta = seconds * (1.0 - session.progress) / session.progress
        place = {"iteration": iteration, "iterations": budget.iterations}
        step = {"loss": loss, "grad_norm": self._grad_norm, "lr": lr}
        records.timing(
            **place,
            train_seconds=seconds,
            tokens_per_second=speed,
            mfu=mfu,
            eta_seconds=eta,
            **session.optimizer.statistics(),
        )
        records.progress(
            **place,
            **step,
            progress=session.progress,
            first_progress=self._first_progress,
            tokens_per_second=speed,
            eta_seconds=eta,
        )
        norm = "overflow" if self._grad_norm is None else f"{self._grad_norm:.3f}"
        of = f" ({session.progress:.1%})" if budget.is_time else f"/{budget.iterations}"
        records.log(
            "TRAIN",
            f"it {iteration}{of}   loss {loss:.4f}   lr {lr:.3e}   grad norm {norm}   "
            f"{speed:,.0f} tok/s{'' if mfu is None else f' ({mfu:.1%} MFU)'}   "
            f"eta {format_duration(eta)}",
        )
        fallbacks = len(session.oom_fallbacks)
        figures = {"toks_per_s": speed, "mfu": mfu, "eta_s": eta, "fallbacks": fallbacks}
        session.beat("train", **step, **figures)
        log_health_check(session)
        session.sidecars.check()
        self._losses.clear()
        self._line_at = (iteration, seconds)


def peak_flops(session: TrainingSession) -> float | None:
    """Return the peak FLOP/s of all devices of the run; log a line and return None if unknown.

    Model FLOPs utilisation (MFU) is the share of it that training uses. Model FLOPs are counted as
    forward plus twice that for backward, at full context, with the attended pairs only. Recomputation
    to save memory is not counted (Chowdhery et al. 2022, arXiv 2204.02311, appendix B; the paper counts
    all pairs of attention).
    """
    machine, tflops = session.config.machine, session.config.telemetry.peak_tflops
    name = device_name(session.device)
    if tflops is None and session.device.type == "cuda":
        tflops = peak_tflops(name, machine.precision, machine.matmul_precision)
    if tflops is None:
        what = f"no MFU: unknown {machine.precision} peak of {name}"
        session.records.log("TRAIN", f"{what}; set PEAK_TFLOPS")
        return None
    return tflops * _TERA * session.group.size


def record_statistics(session: TrainingSession) -> None:
    """Append statistics of the first training sequences, the same text in all runs of a study."""
    session.statistics_at = session.iteration
    model, rows = session.whole_model(), session.config.telemetry.statistics_rows
    if not session.group.is_main:
        return
    sequences_BT = torch.from_numpy(session.sampler().sequences(0, rows)[:, :-1])
    gpus, training = [session.device] if session.device.type == "cuda" else [], model.training
    model.eval()
    try:
        with torch.random.fork_rng(gpus), autocast(session.config.machine):
            values = collect_statistics(model, sequences_BT.to(session.device))
    except torch.OutOfMemoryError:
        what = f"no statistics at iteration {session.iteration}: out of memory"
        session.records.line("WARN", f"{what}; reduce STATISTICS_ROWS={rows}")
        return
    finally:
        model.train(training)
    session.records.metrics(
        kind="statistics", iteration=session.iteration, tokens=session.tokens, values=values
    )
    # The inputs of the watch rules: gates over branches, of the worst layer.
    gates: dict[str, Any] = {}
    for field, suffix, worst in (
        ("gate_entropy", "/gate_entropy", min),
        ("gate_max", "/gate_largest", max),
    ):
        layers = [layers for name, layers in values.items() if name.endswith(suffix)]
        if found := [value for each in layers for value in each if value is not None]:
            gates[field] = worst(found)
    statistics = reduce_over_layers(values)
    session.beat("statistics", statistics=statistics, **gates)
