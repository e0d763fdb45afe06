"""Options of the TensorBoard tracker."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TrackerTensorboardOptions:
    """Options of the TensorBoard tracker; it has none."""

    name: ClassVar[str] = "tracker_tensorboard"
    package: ClassVar[str] = "tensorboard"
