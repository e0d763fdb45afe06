"""Context of the checks in one process: their folder, a prepared text, and a second process.

The peer process makes fresh starts possible, and training on two ranks.
"""

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
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self, TypeVar

import numpy as np
import torch.distributed as dist

from gpt2.check import take_ticket
from gpt2.config import Config
from gpt2.data.prepare import prepare_dataset
from gpt2.data.tokenizer import ByteTokenizer
from lib.env import machine
from lib.env.gpu import GPUS, Gpu
from lib.env.speed import has_bf16_instructions
from lib.errors import KablateError

T = TypeVar("T")
# Target if no GPU is named or present.
DEFAULT_GPU = "a100-80"
# An excerpt of Shakespeare's plays, the default corpus.
_EXCERPT = Path(__file__).with_name("excerpt.txt")
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
    """Context that catches an exception and stores its code and message for a finding."""

    text = ""
    # As in CheckFinding.property.
    code = ""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if not isinstance(error, Exception):
            return False
        self.code, self.text = describe_error(error)
        return True


def describe_error(error: Exception) -> tuple[str, str]:
    """Return the code and a one-line description of an error.

    An exception raised in a file of this package is a defect of the check, and not a property of the
    step. A ``KablateError`` concerns the small form, which the
    check made from a valid configuration: its command, meant for the user of a configuration, is
    omitted.
    """
    if isinstance(error, (TimeoutError, BrokenProcessPool)):
        return "check.peer", f"no result from the second process: {type(error).__name__}"
    if isinstance(error, KablateError):
        text = "; ".join(" ".join(problem.located.split()) for problem in error.problems)
        return error.codes[0], f"{_NOT_THE_CONFIGURATION}: {text}"
    what = " ".join(str(error).split())
    frames = traceback.extract_tb(error.__traceback__)
    # An error of a product belongs to the line that computes it.
    (last,) = [frame for frame in frames if frame.filename != machine.__file__][-1:]
    in_check = Path(last.filename).is_relative_to(Path(__file__).parent)
    code = "check.defect" if in_check else "check.exception"
    source = "defect of the check" if in_check else "exception in the checked code"
    return code, f"{source}: {type(error).__name__}: {what} ({last.filename}:{last.lineno})"


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
        self._tickets = tickets
        self._gpu = gpu
        self._local = local
        self._temporary = tempfile.TemporaryDirectory(prefix="kablate-check-")
        self._folders = count()
        self._values: dict[Hashable, Any] = {}
        # Restored on exit; None if the processor computes in bf16 itself.
        self._products = None if has_bf16_instructions() else machine.NarrowProducts()
        # The small runs must not read a launcher's variables.
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            os.environ.pop(name, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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
        """Return the target of a run on ``device``.

        The target is the GPU named by the user, a GPU of this machine, or the usual GPU of the
        study.
        """
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
        text = _EXCERPT.read_text(encoding="utf-8")
        return [text[:_TRAIN_LENGTH], text[_TRAIN_LENGTH:]]

    @cached_property
    def train_tokens(self) -> np.ndarray:
        """Return the tokens of the training split: bytes, and 256 after each document (uint16)."""
        ids = [[*document.encode(), 256] for document in self.documents]
        return np.array(list(itertools.chain(*ids)), dtype="<u2")

    @cached_property
    def held_out(self) -> list[str]:
        """Return the held-out documents, consecutive parts of the excerpt."""
        text = _EXCERPT.read_text(encoding="utf-8")
        # Skip the first character, so that no document begins like a training document.
        ends = itertools.accumulate(_HELD_OUT_LENGTHS, initial=1)
        return [text[a:b] for a, b in itertools.pairwise(ends)]

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the excerpt's byte tokens (uint16)."""
        return ByteTokenizer().encode(_EXCERPT.read_text(encoding="utf-8")).astype("<u2")

    @cached_property
    def peer(self) -> ProcessPoolExecutor:
        """Return another process with the same code, patched or not, forked at its first use."""
        return ProcessPoolExecutor(1, multiprocessing.get_context("fork"))

    def prepare_data(self, config: Config) -> Path:
        """Return the build folder, with the excerpt prepared for the small ``config``."""
        # Suppress warnings about the size of the excerpt.
        with contextlib.redirect_stderr(io.StringIO()):
            prepare_dataset(config.data, self.folder)
        return self.folder

    def new_run_dir(self) -> Path:
        """Create an empty folder."""
        folder = self.folder / f"run-{next(self._folders)}"
        folder.mkdir()
        return folder
