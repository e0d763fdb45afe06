"""Options of the trackio tracker."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TrackerTrackioOptions:
    """Options of the trackio tracker; it has none."""

    name: ClassVar[str] = "tracker_trackio"
    package: ClassVar[str] = "trackio"
