"""Options of the verdicts on a study; imports no torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from lib.config.field import kconfig_field
from lib.errors import ConfigError, Problem

# With fewer seeds, the estimate of a variance is too uncertain.
MIN_SEEDS = 3
# Units of losses and differences → their names.
NATS, BITS_PER_BYTE = "nats", "bits_per_byte"
UNITS = {NATS: "nats per token", BITS_PER_BYTE: "bits per byte"}
# Share of the only look at a fixed list of seeds; the rest allows a later extension.
FIXED_SHARE = 0.9
# Shares are sums of decimal fractions.
_TOLERANCE = 1e-9


def short_unit(unit: str) -> str:
    """Return the name of a unit behind a number: nats, bits per byte."""
    return unit.removesuffix(" per token")


@dataclass(frozen=True)
class LookPlan:
    """The planned looks: numbers of seeds, ascending, and the share of alpha that each spends."""

    seeds: tuple[int, ...]
    shares: tuple[float, ...]

    @classmethod
    def fixed(cls, seeds: int) -> "LookPlan":
        """Return the plan of a fixed list of ``seeds`` seeds: one look at its end."""
        return cls((max(seeds, MIN_SEEDS),), (FIXED_SHARE,))

    @property
    def problems(self) -> list[Problem]:
        seeds, shares, problems = self.seeds, self.shares, []
        if not seeds or seeds[0] < MIN_SEEDS or sorted({*seeds}) != [*seeds]:
            shown = ",".join(map(str, seeds)) or "nothing"
            what = f"VERDICT_LOOKS: expected ascending numbers from {MIN_SEEDS}, got {shown}"
            problems.append(Problem(what, code="config.out-of-range"))
        shown = ",".join(f"{share:g}" for share in shares) or "nothing"
        if not all(share > 0 for share in shares) or math.fsum(shares) > 1 + _TOLERANCE:
            what = f"VERDICT_SPEND: expected shares above 0 with a sum of at most 1, got {shown}"
            problems.append(Problem(what, code="config.out-of-range"))
        if len(shares) != len(seeds):
            what = f"VERDICT_SPEND: expected {len(seeds)} shares, as VERDICT_LOOKS, got {shown}"
            problems.append(Problem(what, code="config.conflict"))
        return problems


def sum_of_shares(shares: Sequence[float]) -> Decimal:
    """Return the exact sum of decimal fractions, so that halves of the rest are exact too."""
    return sum((Decimal(repr(share)) for share in shares), Decimal(0))


@dataclass(frozen=True)
class VerdictOptions:
    """Declared rule of the verdicts. Not part of any run's identity: it changes no run."""

    # shared, own or factorial
    variance: str = kconfig_field("VERDICT_VARIANCE", identity=False)
    # both, baseline or parent
    against: str = kconfig_field("VERDICT_AGAINST", identity=False)
    # Two-way interactions of a factorial design.
    interactions: bool = kconfig_field("VERDICT_INTERACTIONS", identity=False)
    alpha: float = kconfig_field("VERDICT_ALPHA", low=1e-4, high=0.05, identity=False)
    power: float = kconfig_field("VERDICT_POWER", low=0.5, high=0.99, identity=False)
    # Plan an A/A step, and test it.
    aa: bool = kconfig_field("VERDICT_AA", identity=False)
    # nats or bits_per_byte, unless the file of the study has another.
    unit: str = kconfig_field("VERDICT_UNIT", identity=False)
    # In this unit.
    band: float = kconfig_field("VERDICT_BAND", low=0.0, high=100.0, identity=False)
    # Standard deviation of a run over seeds, and the effect to notice, in this unit; 0 if unknown.
    noise: float = kconfig_field("VERDICT_NOISE", low=0.0, high=100.0, identity=False)
    effect: float = kconfig_field("VERDICT_EFFECT", low=0.0, high=100.0, identity=False)
    # Looks of SEEDS=auto: numbers of seeds, and the share of alpha that each spends.
    looks: tuple[int, ...] = kconfig_field("VERDICT_LOOKS", identity=False)
    spend: tuple[float, ...] = kconfig_field("VERDICT_SPEND", identity=False)

    def __post_init__(self) -> None:
        if problems := self.look_plan.problems:
            raise ConfigError(*problems)

    @property
    def look_plan(self) -> LookPlan:
        return LookPlan(self.looks, self.spend)
