"""What a run is for, and how strictly it is held to that; imports no torch."""

from dataclasses import dataclass

from lib.binding import symbol


@dataclass(frozen=True)
class ReproConfig:
    """The run's profile and the rules that come with it."""

    # paper_repro or maxout_speed
    profile: str = symbol("RUN_PROFILE")
