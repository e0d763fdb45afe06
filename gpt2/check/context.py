"""Context of the checks in one process: their folder, a prepared text, and a second process."""

import contextlib
import io
import itertools
import json
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable, Hashable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch.distributed as dist

from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from lib.env import machine
from lib.env.gpu import GPUS, Gpu
from lib.env.speed import has_bf16_instructions
from lib.errors import KablateError

T = TypeVar("T")
# Target if no GPU is named or present.
DEFAULT_GPU = "a100-80"
# Of Shakespeare's plays, the default corpus.
_EXCERPT = Path(__file__).with_name("excerpt.txt").read_text(encoding="utf-8")
# Length of the first training document, near the half. The hash of its text would hold it out under any
# VAL_FRACTION, so a preparation that ignores the side of a file trains on fewer documents.
_TRAIN_LENGTH = 1451
# Characters of the held-out documents. The evaluation's budget, 150 tokens, ends within them: it takes
# five windows of four documents, two of them shorter than the small context, and a later window
# would still fit.
_HELD_OUT_LENGTHS = (130, 63, 63, 19, 19, 55, 81, 55, 7, 100, 130)
# Limit for a result of the peer, which may be blocked in a collective operation.
PEER_TIMEOUT_SECONDS = 120.0
_NOT_THE_CONFIGURATION = (
    "error in the product or in the check, not in the configuration: the small form of this step "
    "failed"
)


class ErrorCapture:
    """Context that catches an exception and describes it in one line, for a finding.

    An exception raised in a file of this package is a defect of the check, and not a property of the
    step. A ``KablateError`` concerns the small form, which the check made from a valid
    configuration: its command, meant for the user of a configuration, is omitted.
    """

    text = ""
    # As in CheckFinding.property.
    code = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: object, trace: TracebackType | None) -> bool:
        match error:
            case TimeoutError() | BrokenProcessPool():
                self.code = "check.peer"
                self.text = f"no result from the second process: {type(error).__name__}"
            case KablateError():
                text = "; ".join(" ".join(p.located.split()) for p in error.problems)
                self.code, self.text = error.codes[0], f"{_NOT_THE_CONFIGURATION}: {text}"
            case Exception():
                frames = traceback.extract_tb(trace)
                # An error of a product belongs to the line that computes it.
                (last,) = [f for f in frames if f.filename != machine.__file__][-1:]
                in_check = Path(last.filename).is_relative_to(Path(__file__).parent)
                self.code = "check.defect" if in_check else "check.exception"
                source = "defect of the check" if in_check else "exception in the checked code"
                what = f"{type(error).__name__}: {' '.join(str(error).split())}"
                self.text = f"{source}: {what} ({last.filename}:{last.lineno})"
        return bool(self.code)


def take_ticket(ticket: Path) -> bool:
    """Return whether this process is the first to take the ticket."""
    try:
        os.close(os.open(ticket, os.O_CREAT | os.O_EXCL))
    # After an interrupt the folder of tickets is gone.
    except (FileExistsError, FileNotFoundError):
        return False
    return True


class CheckContext:
    """Context for the checks of one process; removes its files on exit.

    ``build_dir`` is the user's build folder, which is only read; ``gpu`` is the GPU named by the
    user, and ``local`` the first GPU of this machine. ``tickets`` is a folder that the workers of a
    study share.
    """

    def __init__(
        self,
        build_dir: Path = Path(),
        gpu: Gpu | None = None,
        local: Gpu | None = None,
        tickets: Path | None = None,
    ) -> None:
        self.build_dir = build_dir
        self._tickets, self._gpu, self._local = tickets, gpu, local
        self._temporary = tempfile.TemporaryDirectory(prefix="kablate-check-")
        self._values: dict[Hashable, Any] = {}
        # Restored on exit; None if the processor computes in bf16 itself.
        self._products = None if has_bf16_instructions() else machine.NarrowProducts()
        # The small runs must not read a launcher's variables.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_peer()
        if self._products:
            self._products.restore()
        self._temporary.cleanup()

    def end_peer(self) -> None:
        """End the second process, if any; the next use forks another."""
        if "peer" in vars(self):
            self.peer.shutdown(wait=False, cancel_futures=True)
            # It may be blocked in a collective operation.
            for process in multiprocessing.active_children():
                process.kill()
            del self.peer
            if dist.is_initialized():
                # So that the next peer can form a new group.
                dist.destroy_process_group()
            (self.folder / "rendezvous").unlink(missing_ok=True)

    def target(self, device: str) -> Gpu | Literal["cpu"]:
        """Return the named GPU; for a run on ``device``, the CPU, this machine's GPU, or the default."""
        if self._gpu is not None:
            return self._gpu
        return "cpu" if device == "cpu" else self._local or GPUS[DEFAULT_GPU]

    def once(self, key: Hashable, compute: Callable[[], T]) -> T:
        """Return the value of the first call with ``key``, which the steps of this process share."""
        if key not in self._values:
            self._values[key] = compute()
        value: T = self._values[key]
        return value

    def is_first(self, what: str) -> bool:
        """Return whether no step of the study has asked for ``what``, which is done once."""
        return take_ticket((self._tickets or self.folder) / what)

    @cached_property
    def folder(self) -> Path:
        """Return a build folder with the excerpt as documents of training and held-out data."""
        folder = Path(self._temporary.name)
        (folder / "text").mkdir()
        for name, documents in (("train", self.documents), ("val", self.held_out)):
            lines = [json.dumps({"text": document}) + "\n" for document in documents]
            (folder / "text" / f"{name}.jsonl").write_text("".join(lines), encoding="utf-8")
        return folder

    @cached_property
    def documents(self) -> list[str]:
        """Return the training documents, the excerpt in two parts."""
        return [_EXCERPT[:_TRAIN_LENGTH], _EXCERPT[_TRAIN_LENGTH:]]

    @cached_property
    def train_tokens(self) -> np.ndarray:
        """Return the tokens of the training split: bytes, and 256 after each document (uint16)."""
        ids = [[*document.encode(), 256] for document in self.documents]
        return np.array(list(itertools.chain(*ids)), dtype="<u2")

    @cached_property
    def held_out(self) -> list[str]:
        """Return the held-out documents, consecutive parts of the excerpt."""
        # Skip the first character, so that no document begins like a training document.
        ends = itertools.accumulate(_HELD_OUT_LENGTHS, initial=1)
        return [_EXCERPT[a:b] for a, b in itertools.pairwise(ends)]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the excerpt's byte tokens (int64)."""
        return np.frombuffer(_EXCERPT.encode(), dtype=np.uint8).astype("int64")

    @cached_property
    def peer(self) -> ProcessPoolExecutor:
        """Return another process with the same code, for fresh starts and for a second rank."""
        return ProcessPoolExecutor(1, multiprocessing.get_context("fork"))

    def prepare_data(self, config: Config) -> Path:
        """Return the build folder, with the excerpt prepared for the small ``config``."""
        # Suppress warnings about the size of the excerpt.
        with contextlib.redirect_stderr(io.StringIO()):
            prepare_dataset(config.data, self.folder)
        return self.folder

    def new_run_dir(self) -> Path:
        """Create an empty folder."""
        return Path(tempfile.mkdtemp(prefix="run-", dir=self.folder))
