"""Options of mirroring to Weights & Biases."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol


@dataclass(frozen=True)
class TrackerWandbOptions:
    """Where the runs go."""

    name: ClassVar[str] = "tracker_wandb"
    package: ClassVar[str] = "wandb"
    # online or offline
    mode: str = symbol("TRACKER_WANDB_MODE", identity=False)
    # "" is the account's own.
    entity: str = symbol("TRACKER_WANDB_ENTITY", identity=False)
