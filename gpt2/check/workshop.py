"""What the checks of one process share: a folder, a prepared text, a second process."""

import contextlib
import io
import os
import tempfile
from functools import cached_property
from importlib import import_module
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import numpy as np

from gpt2.check.partner import Partner
from gpt2.config import Config
from gpt2.data.prepare import prepare
from gpt2.data.tokenizer import ByteTokenizer
from lib.machine.gpus import GPUS, Gpu, present_gpu

# Where none was named and none is here.
USUAL_GPU = "a100-80"
# Of Shakespeare's plays, which the default corpus holds.
EXCERPT = Path(__file__).with_name("excerpt.txt")


class Workshop:
    """Use it as a context: it leaves nothing behind.

    ``build_dir`` is the user's build folder, which is only read; ``gpu`` is the one that the user
    named.
    """

    def __init__(self, build_dir: Path = Path(), gpu: Gpu | None = None) -> None:
        self.build_dir = build_dir
        self._gpu = gpu
        self._temporary = tempfile.TemporaryDirectory(prefix="kablate-check-")
        self._folders = count()
        # Of full-size steps that others are compared with, by slug.
        self.built_params: dict[str, int] = {}
        # A launcher's variables are not meant for the small runs in here.
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
        self.dismiss()
        self._temporary.cleanup()

    def dismiss(self) -> None:
        """End the second process, if there is one; the next use makes another."""
        if "partner" in vars(self):
            self.partner.close()
            del self.partner
            import_module("gpt2.check.parallel").part()
            (self.folder / "rendezvous").unlink(missing_ok=True)

    def target(self, device: str) -> Gpu | Literal["cpu"]:
        """What a run on ``device`` has to fit: the GPU that was named, one that is here, or the
        study's usual one."""
        if self._gpu is not None:
            return self._gpu
        return "cpu" if device == "cpu" else present_gpu() or GPUS[USUAL_GPU]

    @cached_property
    def folder(self) -> Path:
        """A build folder with the excerpt as nanoGPT's token files."""
        folder = Path(self._temporary.name)
        (folder / "text").mkdir()
        self.tokens.tofile(folder / "text" / "train.bin")
        # The same document on both sides would be refused.
        self.tokens[1:].tofile(folder / "text" / "val.bin")
        return folder

    @cached_property
    def tokens(self) -> np.ndarray:
        """The excerpt's byte tokens (uint16)."""
        return ByteTokenizer().encode(EXCERPT.read_text(encoding="utf-8")).astype("<u2")

    @cached_property
    def partner(self) -> Partner:
        """Another process with the same code, which has seen no step yet."""
        # Before the fork: the two processes load nothing on their own.
        import_module("gpt2.check.parallel")
        import_module("gpt2.check.reload")
        return Partner()

    def prepared(self, config: Config) -> Path:
        """The build folder, with the excerpt prepared as the small ``config`` wants it."""
        # What it says of the excerpt's size is of no interest.
        with contextlib.redirect_stderr(io.StringIO()):
            prepare(config.data, self.folder)
        return self.folder

    def new_folder(self) -> Path:
        """An empty folder."""
        folder = self.folder / f"run-{next(self._folders)}"
        folder.mkdir()
        return folder
