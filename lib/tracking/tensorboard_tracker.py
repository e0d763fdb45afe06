"""TensorBoard tracker, writing event files.

The tracker uses the writer of the tensorboard package: that of torch would import torch.
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

from lib.report.render import markdown_table
from lib.runs.run_dir import RunDir
from lib.tracking.options import TrackerTensorboardOptions
from lib.tracking.tracker import TrackerMetadata, TrackerTable


class TrackerTensorboard:
    """Implementation of ``lib.tracking.tracker.Tracker``; writes to ``trackers/tensorboard``."""

    def __init__(self, options: TrackerTensorboardOptions, run: RunDir) -> None:
        self._folder = run.trackers / "tensorboard"

    def start(self, facts: TrackerMetadata, *, resumed: bool) -> None:
        """Open a new event file; TensorBoard appends it to earlier ones. Write the configuration."""
        self._writer = EventFileWriter(str(self._folder))
        if not resumed:
            self._json("config", {**facts.config, "project": facts.project, "id": facts.id})

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Write metrics at an iteration."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in metrics.items()]
        self._write(Summary(value=values), iteration)

    def table(self, name: str, table: TrackerTable, iteration: int) -> None:
        """Write a table as Markdown."""
        rows = [["" if cell is None else str(cell) for cell in row] for row in table.rows]
        self._text(name, markdown_table(table.header, rows), iteration)

    def kept(self, told: int) -> int:
        """Return ``told``: every event is flushed, and a failed write raises at once."""
        return told

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Write the settings known at the end, and close the file."""
        self._json("end", {**settings, "exit_code": exit_code})
        self._writer.close()

    def _json(self, tag: str, facts: Mapping[str, Any]) -> None:
        # Indent by four spaces so that Markdown shows the text as a code block.
        lines = json.dumps(facts, indent=4, sort_keys=True).splitlines()
        self._text(tag, "\n".join(f"    {line}" for line in lines), 0)

    def _text(self, tag: str, text: str, iteration: int) -> None:
        plugin = SummaryMetadata.PluginData(plugin_name="text")
        value = Summary.Value(
            tag=tag,
            metadata=SummaryMetadata(plugin_data=plugin),
            tensor=TensorProto(dtype=DT_STRING, string_val=[text.encode()]),
        )
        self._write(Summary(value=[value]), iteration)

    def _write(self, summary: Summary, iteration: int) -> None:
        self._writer.add_event(Event(wall_time=time.time(), step=iteration, summary=summary))
        # Events counted as sent must be in the file even if this process is killed.
        self._writer.flush()
