"""Options of the run profile and its rules; imports no torch."""

from dataclasses import dataclass

from lib.config.field import kconfig_field


@dataclass(frozen=True)
class ReproConfig:
    """Profile of a run and the rules of the profile."""

    # paper_repro or maxout_speed
    profile: str = kconfig_field("RUN_PROFILE")
    # Reasons for settings that a paper must justify; "" if none.
    precision_why: str = kconfig_field("PRECISION_WHY", identity=False)
    matmul_why: str = kconfig_field("MATMUL_WHY", identity=False)
    # Minimum number of seeds of a final result.
    finalist_min_seeds: int = kconfig_field("FINALIST_MIN_SEEDS", identity=False)

    @property
    def strict(self) -> bool:
        """Return whether results must be bitwise reproducible (profile paper_repro)."""
        return self.profile == "paper_repro"
