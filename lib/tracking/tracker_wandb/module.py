"""Weights & Biases, online or offline."""

import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import wandb

from lib.errors import RunError
from lib.rundir import RunDir
from lib.tracking.contract import Facts
from lib.tracking.tracker_wandb.options import TrackerWandbOptions

# A server that has not answered by then is away.
_INIT_SECONDS = 20.0
_BLOCK = 1 << 15
_CHUNK_HEAD = 7
_REFUSED = re.compile(r"\b401\b")


class TrackerWandb:
    """Keeps ``lib.tracking.contract.Tracker``; its files lie in ``trackers/wandb``."""

    def __init__(self, options: TrackerWandbOptions, run: RunDir) -> None:
        self._options = options
        self._folder = run.trackers

    def start(self, facts: Facts, *, resumed: bool) -> None:
        """Open the run, or go on with it: the server, or "wandb sync", knows it by its id."""
        online = self._options.mode == "online"
        self._finished = False
        settings = wandb.Settings(
            console="off",
            # The configuration has the commit; an address of a remote may hold a password.
            disable_git=True,
            init_timeout=_INIT_SECONDS,
        )
        try:
            self._run = wandb.init(
                mode="online" if online else "offline",
                entity=self._options.entity or None,
                project=facts.project,
                name=facts.name,
                group=facts.study,
                id=facts.id,
                resume="allow" if online else None,
                config=facts.config,
                dir=self._folder,
                save_code=False,
                settings=settings,
            )
        except wandb.errors.Error as error:
            if _REFUSED.search(str(error)) is None:
                raise
            what = "the server takes no such key (401): set WANDB_API_KEY, or type wandb login"
            raise RunError(what) from error

    def log(self, metrics: Mapping[str, float], iteration: int) -> None:
        """Show metrics at an iteration."""
        self._run.log(dict(metrics), step=iteration)

    def kept(self, told: int) -> int:
        """What the server had when the run was opened; all of it at the end.

        Offline, each start begins a file, which has to be whole at the end: W&B goes on in silence
        where it cannot write.
        """
        if self._options.mode == "online":
            return told if self._finished else self._run.starting_step - 1
        if not self._finished:
            return 0
        # Its other process writes the last records only when it ends.
        wandb.teardown()
        files = [*Path(self._run.sync_dir).glob("*.wandb")]
        return told if files and all(map(ends_whole, files)) else 0

    def finish(self, exit_code: int, settings: Mapping[str, Any]) -> None:
        """Send what is left, or close the file."""
        self._run.config.update(dict(settings), allow_val_change=True)
        self._run.finish(exit_code=exit_code)
        self._finished = True


def ends_whole(file: Path) -> bool:
    """Whether the last record of W&B's offline file is there to its last byte.

    The file is a log of LevelDB's form: blocks of 32 KiB, in them chunks of checksum, length, kind (1
    a whole record, 4 the last part of one) and content; the first block begins with seven bytes of
    W&B's own. Where the disk was full, it was cut off somewhere.
    """
    size = file.stat().st_size
    start = max(0, size - 1) // _BLOCK * _BLOCK
    with open(file, "rb") as stream:
        stream.seek(start)
        block = stream.read()
    at, kind = (0 if start else _CHUNK_HEAD), 0
    while at + _CHUNK_HEAD <= len(block):
        length, kind = struct.unpack_from("<HB", block, at + 4)
        at += _CHUNK_HEAD + length
    return at == len(block) and kind in (1, 4)
