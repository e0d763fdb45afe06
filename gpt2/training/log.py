"""Training log: a metrics row per iteration, and a log line per log interval."""

import math
from collections import deque

import torch

from gpt2.training.budget import seconds_left
from gpt2.training.finite import require_finite
from gpt2.training.first_steps import tell_first_steps
from gpt2.training.passes import Measured
from gpt2.training.session import Session
from gpt2.training.statistics import fallbacks
from gpt2.training.utilisation import mfu, peak_flops


class Log:
    """Buffer of step metrics still on the device; reading them synchronizes with the GPU."""

    def __init__(self, session: Session) -> None:
        self._session = session
        # Values known on the host, and metrics on the device, of each unwritten row.
        self._pending: deque[tuple[dict[str, float], Measured]] = deque()
        # Losses since the last log line, and iteration and training seconds of that line.
        self._losses: list[float] = []
        self._grad_norm: float | None = None
        self._line_at = (session.iteration, session.watch.seconds)
        self._peak_flops = peak_flops(session)

    def add(self, measured: Measured, lr: float) -> None:
        """Add the metrics of the last step; write and log them at the end of the log interval."""
        session = self._session
        row = {
            "iteration": session.iteration,
            "tokens": session.tokens,
            "progress": session.progress,
            "lr": lr,
        }
        self._pending.append((row, measured))
        if session.iteration % session.config.train.log_interval == 0 or session.progress >= 1.0:
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
            self._losses.append(loss)
            self._pending.popleft()

    def _line(self, lr: float) -> None:
        session = self._session
        iterations, seconds = session.iteration - self._line_at[0], session.watch.seconds
        tokens = iterations * session.budget.tokens_per_iteration
        speed = tokens / max(seconds - self._line_at[1], 1e-9)
        utilisation = mfu(session, speed, self._peak_flops)
        loss = math.fsum(self._losses) / len(self._losses)
        eta = seconds_left(session.progress, seconds)
        session.records.timing(
            iteration=session.iteration,
            iterations=session.budget.iterations,
            train_seconds=seconds,
            tokens_per_second=speed,
            mfu=utilisation,
            eta_seconds=eta,
            **session.optimizer.statistics(),
        )
        session.records.progress(
            progress=session.progress,
            iteration=session.iteration,
            iterations=session.budget.iterations,
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
            f"eta {clock_time(eta)}",
        )
        session.heartbeat.beat(
            "train",
            session.iteration,
            loss=loss,
            grad_norm=self._grad_norm,
            lr=lr,
            toks_per_s=speed,
            mfu=utilisation,
            eta_s=eta,
            fallbacks=fallbacks(session),
        )
        tell_first_steps(session, self._line_at[0])
        session.companions.check()
        self._losses.clear()
        self._line_at = (session.iteration, seconds)


def clock_time(seconds: float | None) -> str:
    """Format seconds as ``mm:ss``, ``h:mm:ss`` from one hour on, or ``?`` if unknown."""
    if seconds is None:
        return "?"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes:02d}:{rest:02d}"


def _position(session: Session) -> str:
    if session.budget.is_time:
        return f"it {session.iteration} ({session.progress:.1%})"
    return f"it {session.iteration}/{session.budget.iterations}"
