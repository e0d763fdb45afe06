"""Configurations in which faults are planted: together they execute every mechanism. No torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache

from gpt2.check.cases import CheckCase, CheckPlan, plan_cases
from lib.config.dotconfig import defconfig_layers
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.project import ROOT


@dataclass(frozen=True)
class TrialCase:
    """One step of a defconfig, with settings on top."""

    defconfig: str
    slug: str
    settings: Mapping[str, SymbolValue] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the name in reports."""
        values = [f"+{name}={value}" for name, value in self.settings.items()]
        return f"{self.defconfig}/{self.slug}{''.join(values)}"


_RATIO, _MECHANISMS, _NSA = "gpt2-ratio-ablation", "gpt2-mechanisms", "nsa-quickstart"
_MATRIX = "test-matrix-optimizers"
_STEPS: Mapping[str, tuple[str, ...]] = {
    _RATIO: ("baseline", "pruned-50", "golden-gate-cross", "full", "ract-entropy"),
    _MECHANISMS: ("mqa", "sliding", "ra-learnable", "mla-tied", "gate-pooled", "cross-rms", "rope"),
    _NSA: ("nsa", "nsa-no-compressed"),
    _MATRIX: ("sgd-movement", "adam-magnitude", "adamwadv-none", "adamwprune-state"),
}
CASES = {
    case.name: case
    for case in (
        *(TrialCase(defconfig, slug) for defconfig, slugs in _STEPS.items() for slug in slugs),
        TrialCase(
            "gpt2-ratio-small", "baseline", {"LR_SCHEDULE_WSD": True, "DROPOUT": "0.1", "SEED": 3}
        ),
        TrialCase("gpt2-shakespeare", "run", {"LR_SCHEDULE_LINEAR": True, "LOADER_WORKERS": 1}),
    )
}


@cache
def planned(defconfig: str, *settings: tuple[str, SymbolValue]) -> CheckPlan:
    """Return the cases of a defconfig with settings on top."""
    layer = ConfigLayer.of("mutation", "mutation-test", dict(settings))
    return plan_cases([*defconfig_layers(ROOT, defconfig), layer])


def check_case(case: TrialCase) -> tuple[CheckCase, dict[str, CheckCase]]:
    """Return the case as ``make check`` sees it, and the steps to compare it with by slug.

    These are its parent, and the steps that its title names.
    """
    plan = planned(case.defconfig, *case.settings.items())
    (chosen,) = [other for other in plan.every if other.slug == case.slug]
    near = {chosen.parent}
    near |= set(re.findall(r"[\w-]+", chosen.title.lower())) - {case.slug}
    return chosen, {other.slug: other for other in plan.every if other.slug in near}


def config_digests() -> dict[str, str]:
    """Return a digest of every case of the defconfigs, "" for a case that does not resolve."""
    return {
        TrialCase(defconfig, case.slug).name: case.config.digest if case.config else ""
        for defconfig in sorted({case.defconfig for case in CASES.values()})
        for case in planned(defconfig).every
    }
