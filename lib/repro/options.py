"""What a run is for, and how strictly it is held to that; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class ReproConfig:
    """The run's profile and the rules that come with it."""

    # paper_repro or maxout_speed
    profile: str = symbol("RUN_PROFILE")
    # Reasons for what a paper does not take for granted; empty where there is none.
    precision_why: str = symbol("PRECISION_WHY", identity=False)
    matmul_why: str = symbol("MATMUL_WHY", identity=False)
    # Seeds without which a final result is none.
    finalist_min_seeds: int = symbol("FINALIST_MIN_SEEDS", identity=False)

    @property
    def strict(self) -> bool:
        """Whether every bit has to come out again: paper_repro."""
        return self.profile == "paper_repro"
