"""Optimizers that a configuration can select, and their options; imports no torch."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from lib.config.field import component_field, kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import always, at_most
from lib.errors import ConfigError, Problem

# Whether a rule holds, its problem, and the problem's code.
Rule = tuple[bool, str, str]


@dataclass(frozen=True)
class DecayOptions:
    """Base of the options of an optimizer with its own weight decay."""

    name: ClassVar[str]
    # Whether hidden matrices are updated as matrices, and not by element.
    whole_matrices: ClassVar[bool] = False

    weight_decay: float = kconfig_field("WEIGHT_DECAY", low=0.0, high=100.0)

    def __post_init__(self) -> None:
        broken = [Problem(what, code=code) for holds, what, code in self._rules() if not holds]
        if broken:
            raise ConfigError(*broken)

    @property
    def summary(self) -> str:
        """Return one line for a plan."""
        return f"{self.name}, weight decay {self.weight_decay:g}"

    @property
    def rule(self) -> "DecayOptions":
        """Return the options of the optimizer that updates the weights, by which it is built."""
        return self

    def _rules(self) -> Iterator[Rule]:
        yield from ()


@dataclass(frozen=True)
class AdamFamilyOptions(DecayOptions):
    """Options common to Adam and its variants."""

    # Decoupled weight decay (arXiv 1711.05101) instead of L2 regularization of the gradient.
    decoupled: ClassVar[bool] = True

    # A field of some variants and a constant of others. A property at run time would hide the field.
    if TYPE_CHECKING:

        @property
        def amsgrad(self) -> bool: ...

    beta1: float = kconfig_field("ADAM_BETA1", low=0.0, high=1.0)
    beta2: float = kconfig_field("ADAM_BETA2", low=0.0, high=1.0)
    eps: float = kconfig_field("ADAM_EPS", low=0.0, high=1.0)

    @property
    def summary(self) -> str:
        betas = f"betas {self.beta1:g} {self.beta2:g}"
        return f"{self.name}, {betas}, weight decay {self.weight_decay:g}"

    def _rules(self) -> Iterator[Rule]:
        for name, beta in (("ADAM_BETA1", self.beta1), ("ADAM_BETA2", self.beta2)):
            yield beta < 1.0, f"{name}: must be < 1, got {beta:g}", "config.out-of-range"


@dataclass(frozen=True)
class AdamOptions(AdamFamilyOptions):
    """Options of Adam (arXiv 1412.6980)."""

    name: ClassVar[str] = "adam"
    decoupled: ClassVar[bool] = False

    amsgrad: bool = kconfig_field("ADAM_AMSGRAD")


@dataclass(frozen=True)
class AdamwOptions(AdamFamilyOptions):
    """Options of AdamW (decoupled weight decay regularization, arXiv 1711.05101)."""

    name: ClassVar[str] = "adamw"
    amsgrad: ClassVar[bool] = False


@dataclass(frozen=True)
class AdamwadvOptions(AdamFamilyOptions):
    """Options of AdamW with a non-decreasing second moment (Reddi et al., arXiv 1904.09237)."""

    name: ClassVar[str] = "adamwadv"
    amsgrad: ClassVar[bool] = True


# Interval of resets in a small form, whose budget is a few iterations.
_SMALL_INTERVAL = 3


@dataclass(frozen=True)
class AdamwspamOptions(AdamFamilyOptions):
    """Options of Spike-Aware Adam with Momentum Reset (arXiv 2501.06842).

    All counts are optimizer steps.
    """

    name: ClassVar[str] = "adamwspam"

    theta: float = kconfig_field("SPAM_THETA", low=1.0, high=1e12)
    # First step since the start or a reset with gradient clipping.
    clip_delay: int = kconfig_field("SPAM_CLIP_DELAY", small=at_most(2))
    # In standard deviations of the last ``spike_window`` gradient norms.
    spike_threshold: float = kconfig_field("SPAM_SPIKE_THRESHOLD", low=0.0, high=1e6)
    spike_window: int = kconfig_field("SPAM_SPIKE_WINDOW", small=at_most(3))
    moment_damping: float = kconfig_field("SPAM_MOMENT_DAMPING", low=0.0, high=1.0)
    variance_damping: float = kconfig_field("SPAM_VARIANCE_DAMPING", low=0.0, high=1.0)
    interval: int = kconfig_field("SPAM_INTERVAL", small=always(_SMALL_INTERVAL))
    reset_warmup_steps: int = kconfig_field("SPAM_WARMUP_STEPS", small=at_most(_SMALL_INTERVAL - 1))
    amsgrad: bool = kconfig_field("SPAM_AMSGRAD")

    @property
    def summary(self) -> str:
        reset = f"reset every {self.interval} steps, warm-up {self.reset_warmup_steps}"
        return f"{super().summary}, theta {self.theta:g}, {reset}"

    def age(self, step: int) -> int:
        """Return the steps since the start or the last reset, including ``step`` (from 1)."""
        return (step - 1) % self.interval + 1

    def resets(self, step: int) -> int:
        """Return the number of resets up to and including optimizer step ``step`` (from 1)."""
        return (step - 1) // self.interval

    def warmup_factor(self, step: int) -> float:
        """Return the learning-rate factor of step ``step`` (from 1): (1 − cos(π age / W)) / 2.

        It is 1 before the first reset, where the schedule's warm-up applies, and from age W on.
        """
        age = self.age(step)
        if self.resets(step) == 0 or age >= self.reset_warmup_steps:
            return 1.0
        return (1.0 - math.cos(math.pi * age / self.reset_warmup_steps)) / 2.0

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        what = (
            f"SPAM_WARMUP_STEPS: must be < SPAM_INTERVAL={self.interval} so that the "
            f"warm-up ends, got {self.reset_warmup_steps}"
        )
        yield self.reset_warmup_steps < self.interval, what, "config.conflict"
        what = (
            f"SPAM_CLIP_DELAY: must be <= SPAM_INTERVAL={self.interval} so that "
            f"gradients are clipped, got {self.clip_delay}"
        )
        yield self.clip_delay <= self.interval, what, "config.conflict"


@dataclass(frozen=True)
class MuonOptions(AdamFamilyOptions):
    """Options of Muon (Jordan et al. 2024) for hidden matrices, and of AdamW for the others."""

    name: ClassVar[str] = "muon"
    amsgrad: ClassVar[bool] = False
    whole_matrices: ClassVar[bool] = True

    # Peak of the schedule of hidden matrices.
    learning_rate: float = kconfig_field("MUON_LEARNING_RATE", low=0.0, high=10.0)
    # Named apart from those of SGD: runs of both are compared by the names of their settings.
    muon_momentum: float = kconfig_field("MUON_MOMENTUM", low=0.0, high=1.0)
    muon_nesterov: bool = kconfig_field("MUON_NESTEROV")
    # Of Newton-Schulz.
    steps: int = kconfig_field("MUON_STEPS")
    # shape or rms.
    scale: str = kconfig_field("MUON_SCALE")

    @property
    def summary(self) -> str:
        kind = "Nesterov momentum" if self.muon_nesterov else "momentum"
        muon = (
            f"{self.name} {self.learning_rate:g}, {kind} {self.muon_momentum:g}, {self.steps} steps"
        )
        betas = f"adamw betas {self.beta1:g} {self.beta2:g}"
        return f"{muon}, scale by {self.scale}, {betas}, weight decay {self.weight_decay:g}"

    def scale_of(self, rows: int, columns: int) -> float:
        """Return the factor of an orthogonal update.

        shape is Jordan's √max(1, rows/columns); rms is Moonlight's 0.2 √max(rows, columns), which has
        the root mean square of updates of AdamW (arXiv 2502.16982).
        """
        if self.scale == "rms":
            return 0.2 * math.sqrt(max(rows, columns))
        return math.sqrt(max(1.0, rows / columns))

    def _rules(self) -> Iterator[Rule]:
        yield from super()._rules()
        what = f"MUON_MOMENTUM: must be < 1, got {self.muon_momentum:g}"
        yield self.muon_momentum < 1.0, what, "config.out-of-range"
        what = f"MUON_NESTEROV: requires MUON_MOMENTUM > 0, got {self.muon_momentum:g}"
        yield self.muon_momentum > 0.0 or not self.muon_nesterov, what, "config.conflict"


# Base optimizers of AdamWPrune: their state contains exp_avg and exp_avg_sq.
_ADAM_FAMILY: tuple[type[AdamFamilyOptions], ...] = (
    AdamOptions,
    AdamwOptions,
    AdamwadvOptions,
    AdamwspamOptions,
)
ADAMWPRUNE_BASES = Registry("base optimizer", *_ADAM_FAMILY, choice="ADAMWPRUNE_BASE")


@dataclass(frozen=True)
class AdamwpruneOptions:
    """Options of AdamWPrune; ``base`` contains the options of the optimizer that trains.

    The pruner ``state``, which reads the base's moments, has the options of the pruning.
    """

    name: ClassVar[str] = "adamwprune"

    base: AdamFamilyOptions = component_field(ADAMWPRUNE_BASES)

    @property
    def weight_decay(self) -> float:
        return self.base.weight_decay

    @property
    def summary(self) -> str:
        return f"{self.name} on {self.base.summary}"

    @property
    def rule(self) -> DecayOptions:
        return self.base


@dataclass(frozen=True)
class SgdOptions(DecayOptions):
    """Options of SGD with momentum (Sutskever et al. 2013).

    The momentum has torch's form: the learning rate is not part of the buffer.
    """

    name: ClassVar[str] = "sgd"

    momentum: float = kconfig_field("SGD_MOMENTUM", low=0.0, high=1.0)
    dampening: float = kconfig_field("SGD_DAMPENING", low=0.0, high=1.0)
    nesterov: bool = kconfig_field("SGD_NESTEROV")

    @property
    def summary(self) -> str:
        kind = "Nesterov momentum" if self.nesterov else "momentum"
        return f"{self.name}, {kind} {self.momentum:g}, weight decay {self.weight_decay:g}"

    def _rules(self) -> Iterator[Rule]:
        what = f"SGD_MOMENTUM: must be < 1, got {self.momentum:g}"
        yield self.momentum < 1.0, what, "config.out-of-range"
        what = (
            "SGD_NESTEROV: requires SGD_MOMENTUM > 0 and SGD_DAMPENING=0, got "
            f"{self.momentum:g} and {self.dampening:g}"
        )
        possible = self.momentum > 0.0 and self.dampening == 0.0
        yield possible or not self.nesterov, what, "config.conflict"


OptimizerOptions = DecayOptions | AdamwpruneOptions
OPTIMIZERS: Registry[OptimizerOptions] = Registry(
    "optimizer", SgdOptions, *_ADAM_FAMILY, MuonOptions, AdamwpruneOptions, choice="OPTIMIZER"
)
