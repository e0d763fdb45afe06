"""Options of mirroring to trackio: there are none."""

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TrackerTrackioOptions:
    """Nothing to choose."""

    name: ClassVar[str] = "tracker_trackio"
    package: ClassVar[str] = "trackio"
