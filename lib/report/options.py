"""Options of the verdicts on a study; imports no torch."""

from dataclasses import dataclass

from lib.config.field import kconfig_field
from lib.report.looks import LookPlan


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
    # Nats per token.
    band: float = kconfig_field("VERDICT_BAND", low=0.0, high=100.0, identity=False)
    # Standard deviation of a run over seeds, and the effect to notice, nats per token; 0 if unknown.
    noise: float = kconfig_field("VERDICT_NOISE", low=0.0, high=100.0, identity=False)
    effect: float = kconfig_field("VERDICT_EFFECT", low=0.0, high=100.0, identity=False)
    # Looks of SEEDS=auto: numbers of seeds, and the share of alpha that each spends.
    looks: tuple[int, ...] = kconfig_field("VERDICT_LOOKS", identity=False)
    spend: tuple[float, ...] = kconfig_field("VERDICT_SPEND", identity=False)

    def __post_init__(self) -> None:
        self.look_plan.require_valid()

    @property
    def look_plan(self) -> LookPlan:
        """Return the planned looks of SEEDS=auto."""
        return LookPlan(self.looks, self.spend)
