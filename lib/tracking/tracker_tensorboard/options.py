"""Options of mirroring to TensorBoard: there are none."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TrackerTensorboardOptions:
    """Nothing to choose."""

    name: ClassVar[str] = "tracker_tensorboard"
    package: ClassVar[str] = "tensorboard"
