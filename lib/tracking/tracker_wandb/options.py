"""Options of the Weights & Biases tracker."""

from dataclasses import dataclass
from typing import ClassVar

from lib.binding import symbol


@dataclass(frozen=True)
class TrackerWandbOptions:
    """Mode and entity of the Weights & Biases tracker."""

    name: ClassVar[str] = "tracker_wandb"
    package: ClassVar[str] = "wandb"
    # online or offline
    mode: str = symbol("TRACKER_WANDB_MODE", identity=False)
    # "" selects the account's default entity.
    entity: str = symbol("TRACKER_WANDB_ENTITY", identity=False)
