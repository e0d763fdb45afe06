"""TensorBoard: event files.

Written with the package's own writer: torch's SummaryWriter would load torch for it.
"""

import json
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
from tensorboard.compat.proto.tensor_pb2 import TensorProto
from tensorboard.compat.proto.types_pb2 import DT_STRING
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from lib.rundir import RunDir
from lib.tracking.contract import Facts
from lib.tracking.tracker_tensorboard.options import TrackerTensorboardOptions


class TrackerTensorboard:
    """Keeps ``lib.tracking.contract.Tracker``; its files lie in ``trackers/tensorboard``."""

    def __init__(self, options: TrackerTensorboardOptions, run: RunDir) -> None:
        self._folder = run.trackers / "tensorboard"

    def start(self, facts: Facts, *, resumed: bool) -> None:
        """Begin a file, which goes on where the one before ends; write the configuration as text."""
        self._writer = EventFileWriter(str(self._folder))
        if not resumed:
            self._text("config", {**facts.config, "project": facts.project, "id": facts.id})

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write metrics at an iteration."""
        values = [Summary.Value(tag=tag, simple_value=found) for tag, found in metrics.items()]
        self._write(Summary(value=values), iteration)

    def kept(self, told: int) -> int:
        """All of it: an event that cannot be written is an error at once."""
        return told

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Write what is known only now, and close the file."""
        self._text("end", {**settings, "exit_code": exit_code})
        self._writer.close()

    def _text(self, tag: str, facts: Mapping[str, Any]) -> None:
        # Four blanks before each line: Markdown shows it as it stands.
        lines = json.dumps(facts, indent=4, sort_keys=True).splitlines()
        text = "\n".join(f"    {line}" for line in lines)
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        value = Summary.Value(
            tag=tag,
            metadata=SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        self._write(Summary(value=[value]), 0)

    def _write(self, summary: Summary, iteration: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=iteration, summary=summary))
        # What the position says was told has to be in the file if this process is killed.
        self._writer.flush()
