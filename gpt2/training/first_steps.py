"""Whether a run began well: what its first steps have to show. Looks at records, changes none."""

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

# Log intervals that hold compilation and the allocator's growth.
_STARTING = 2
_LEAST = 5


@dataclass(frozen=True)
class Verdict:
    """What was asked of the first ``steps`` steps, each with what was found."""

    steps: int
    # Criterion → whether it holds and in what words; one that had nothing to look at is absent.
    found: Mapping[str, tuple[bool, str]]

    @property
    def passed(self) -> bool:
        """Whether all hold."""
        return all(holds for holds, _ in self.found.values())

    @property
    def text(self) -> str:
        """One line: all that was found, or what does not hold."""
        wrong = [text for holds, text in self.found.values() if not holds]
        said = wrong or [text for _, text in self.found.values()]
        return f"first {self.steps:,} it {'not well' if wrong else 'well'}: {', '.join(said)}"

    def record(self) -> dict[str, Any]:
        """For the summary."""
        each = {name: {"passed": h, "found": text} for name, (h, text) in self.found.items()}
        return {"steps": self.steps, "passed": self.passed, "criteria": each}


def tell_first_steps(session: Session, before: int) -> None:
    """Say it at the log line that ends them; ``before`` is the iteration of the one before."""
    steps = session.config.train.first_steps
    if session.group.is_main and before < steps <= session.iteration:
        verdict = first_steps(session)
        assert verdict
        session.records.line("FIRST" if verdict.passed else "WARN", verdict.text)


def first_steps(session: Session) -> Verdict | None:
    """By what the run has recorded; None before their end, or where they are not looked at."""
    steps = session.config.train.first_steps
    if not 0 < steps <= session.iteration:
        return None
    return judge(read_facts(session.run, time.time()), session.config)


def judge(facts: Facts, config: Config) -> Verdict:
    """Loss, gradients, gates and speed of the first ``FIRST_STEPS`` steps."""
    steps = config.train.first_steps
    rows = [row for row in facts.train if row["iteration"] <= steps]
    # A step that was made again after a resume has two.
    beats = [beat for beat in facts.beats if beat["step"] <= steps]
    early = Facts(facts.status, facts.now, {0: beats}, rows, ())
    found = {
        "loss": _loss(rows, config.model.shape.vocab_size),
        "gradients": _gradients(rows),
        "gates": _gates(early, config),
        "speed": _speed(beats, config.train.first_steps_speed),
    }
    return Verdict(steps, {name: said for name, said in found.items() if said})


def _loss(rows: Sequence[Mapping[str, Any]], vocab_size: int) -> tuple[bool, str]:
    """Finite, below that of guessing, and falling: the last tenth against the first."""
    losses, uniform = [row["loss"] for row in rows], math.log(vocab_size)
    part = max(1, len(losses) // 10)
    first, last = fmean(losses[:part]), fmean(losses[-part:])
    holds = all(map(math.isfinite, losses)) and last < min(first, uniform)
    return holds, f"loss {first:.3f} to {last:.3f}, of guessing {uniform:.3f}"


def _gradients(rows: Sequence[Mapping[str, Any]]) -> tuple[bool, str]:
    """Never zero; of fp16, whose scaler skips steps, known for most."""
    norms = [row["grad_norm"] for row in rows if row["grad_norm"] is not None]
    if not norms:
        return False, "no gradient norm is known"
    holds = min(norms) > 0.0 and 2 * len(norms) > len(rows)
    return holds, f"gradient norms {min(norms):.3f} to {max(norms):.3f} of {len(norms):,} steps"


def _gates(facts: Facts, config: Config) -> tuple[bool, str] | None:
    """Not collapsed, as make watch judges it; None without gates over branches."""
    if not any("gate_entropy" in beat for beat in facts.beats):
        return None
    look = (rules.gate_entropy, rules.gate_max)
    wrong = [said for rule in look if (said := rule(facts, config.watch))]
    return not wrong, ", ".join(wrong) or "gates open"


def _speed(beats: Sequence[Mapping[str, Any]], percent: int) -> tuple[bool, str] | None:
    """Steady from the third log interval on; None where there are too few."""
    speeds = [beat["toks_per_s"] for beat in beats if beat.get("toks_per_s") is not None]
    if len(speeds) < _STARTING + _LEAST:
        return None
    usual = median(speeds[_STARTING:])
    furthest = max(abs(speed / usual - 1) for speed in speeds[_STARTING:])
    text = f"speed within {100 * furthest:.0f} % of {usual:,.0f} tok/s"
    return 100 * furthest <= percent, text
