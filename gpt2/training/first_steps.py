"""Health check of a run's first steps, based on its records: loss, gradients, gates, speed."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from gpt2.config import Config
from gpt2.training.session import Session
from lib.watch import rules
from lib.watch.facts import Facts, read_facts

# Log intervals excluded for compilation and the allocator's growth.
_STARTUP_INTERVALS = 2
_MIN_INTERVALS = 5


@dataclass(frozen=True)
class Verdict:
    """Result of the health check of the first ``steps`` steps."""

    steps: int
    # Criterion → whether it passed, and a description; criteria without data are absent.
    found: Mapping[str, tuple[bool, str]]

    @property
    def passed(self) -> bool:
        """Return whether all criteria passed."""
        return all(passed for passed, _ in self.found.values())

    @property
    def text(self) -> str:
        """Return one line with the failed criteria, or with all criteria if none failed."""
        failures = [text for passed, text in self.found.values() if not passed]
        texts = failures or [text for _, text in self.found.values()]
        return f"first {self.steps:,} it {'failed' if failures else 'passed'}: {', '.join(texts)}"

    def record(self) -> dict[str, Any]:
        """Return the result as plain JSON for the summary."""
        criteria = {
            name: {"passed": passed, "found": text} for name, (passed, text) in self.found.items()
        }
        return {"steps": self.steps, "passed": self.passed, "criteria": criteria}


def tell_first_steps(session: Session, before: int) -> None:
    """Log the result once the first steps are done; ``before`` is the last log line's iteration."""
    steps = session.config.train.first_steps
    if session.group.is_main and before < steps <= session.iteration:
        verdict = first_steps(session)
        assert verdict
        session.records.line("FIRST" if verdict.passed else "WARN", verdict.text)


def first_steps(session: Session) -> Verdict | None:
    """Check the recorded first steps; None before their end, or if the check is disabled."""
    steps = session.config.train.first_steps
    if not 0 < steps <= session.iteration:
        return None
    return judge(read_facts(session.run, time.time()), session.config)


def judge(facts: Facts, config: Config) -> Verdict:
    """Check loss, gradients, gates and speed of the first ``FIRST_STEPS`` steps."""
    steps = config.train.first_steps
    rows = [row for row in facts.train if row["iteration"] <= steps]
    # Steps repeated after a resume have two heartbeats.
    beats = [beat for beat in facts.beats if beat["step"] <= steps]
    early = Facts(facts.status, facts.now, {0: beats}, rows, ())
    criteria = {
        "loss": _loss(rows, config.model.shape.vocab_size),
        "gradients": _gradients(rows),
        "gates": _gates(early, config),
        "speed": _speed(beats, config.train.first_steps_speed),
    }
    return Verdict(steps, {name: result for name, result in criteria.items() if result})


def _loss(rows: Sequence[Mapping[str, Any]], vocab_size: int) -> tuple[bool, str]:
    """Check that the loss is finite, below uniform guessing, and lower in the last tenth."""
    losses, uniform = [row["loss"] for row in rows], math.log(vocab_size)
    part = max(1, len(losses) // 10)
    first, last = fmean(losses[:part]), fmean(losses[-part:])
    passed = all(map(math.isfinite, losses)) and last < min(first, uniform)
    return passed, f"loss {first:.3f} to {last:.3f} (uniform {uniform:.3f})"


def _gradients(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """Check that gradient norms are never zero, and known for most steps (fp16 skips some)."""
    norms = [row["grad_norm"] for row in rows if row["grad_norm"] is not None]
    if not norms:
        return False, "no gradient norms"
    passed = min(norms) > 0.0 and 2 * len(norms) > len(rows)
    return passed, f"gradient norms {min(norms):.3f} to {max(norms):.3f} of {len(norms):,} steps"


def _gates(facts: Facts, config: Config) -> tuple[bool, str] | None:
    """Check the gates by the rules of make watch; None without gates over branches."""
    if not any("gate_entropy" in beat for beat in facts.beats):
        return None
    gate_rules = (rules.gate_entropy, rules.gate_max)
    warnings = [warning for rule in gate_rules if (warning := rule(facts, config.watch))]
    return not warnings, ", ".join(warnings) or "gates open"


def _speed(beats: Sequence[Mapping[str, Any]], percent: int) -> tuple[bool, str] | None:
    """Check that the speed is steady from the third log interval on; None if there are too few."""
    speeds = [beat["toks_per_s"] for beat in beats if beat.get("toks_per_s") is not None]
    if len(speeds) < _STARTUP_INTERVALS + _MIN_INTERVALS:
        return None
    typical = median(speeds[_STARTUP_INTERVALS:])
    deviation = max(abs(speed / typical - 1) for speed in speeds[_STARTUP_INTERVALS:])
    text = f"speed within {100 * deviation:.0f} % of {typical:,.0f} tok/s"
    return 100 * deviation <= percent, text
