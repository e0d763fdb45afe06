"""State shared by the checks of one process: a directory, a prepared text, a second process."""

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

# Target if no GPU is named or present.
USUAL_GPU = "a100-80"
# An excerpt of Shakespeare's plays, the default corpus.
EXCERPT = Path(__file__).with_name("excerpt.txt")


class Workshop:
    """Context for the checks of one process; removes its files on exit.

    ``build_dir`` is the user's build folder, which is only read; ``gpu`` is the GPU named by the
    user.
    """

    def __init__(self, build_dir: Path = Path(), gpu: Gpu | None = None) -> None:
        self.build_dir = build_dir
        self._gpu = gpu
        self._temporary = tempfile.TemporaryDirectory(prefix="kablate-check-")
        self._folders = count()
        # Parameter counts of full-size steps by slug, for comparison with other steps.
        self.built_params: dict[str, int] = {}
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
        self.dismiss()
        self._temporary.cleanup()

    def dismiss(self) -> None:
        """End the second process, if any; the next use forks another."""
        if "partner" in vars(self):
            self.partner.close()
            del self.partner
            import_module("gpt2.check.parallel").part()
            (self.folder / "rendezvous").unlink(missing_ok=True)

    def target(self, device: str) -> Gpu | Literal["cpu"]:
        """Return the target of a run on ``device``.

        The target is the GPU named by the user, a GPU of this machine, or the usual GPU of the
        study.
        """
        if self._gpu is not None:
            return self._gpu
        return "cpu" if device == "cpu" else present_gpu() or GPUS[USUAL_GPU]

    @cached_property
    def folder(self) -> Path:
        """Return a build folder with the excerpt as nanoGPT's token files."""
        folder = Path(self._temporary.name)
        (folder / "text").mkdir()
        self.tokens.tofile(folder / "text" / "train.bin")
        # An identical document in both splits is an error.
        self.tokens[1:].tofile(folder / "text" / "val.bin")
        return folder

    @cached_property
    def tokens(self) -> np.ndarray:
        """Return the excerpt's byte tokens (uint16)."""
        return ByteTokenizer().encode(EXCERPT.read_text(encoding="utf-8")).astype("<u2")

    @cached_property
    def partner(self) -> Partner:
        """Return another process with the same code, forked before any step was built."""
        # Import before the fork, so that the two processes share the modules.
        import_module("gpt2.check.parallel")
        import_module("gpt2.check.reload")
        return Partner()

    def prepared(self, config: Config) -> Path:
        """Return the build folder, with the excerpt prepared for the small ``config``."""
        # Suppress warnings about the size of the excerpt.
        with contextlib.redirect_stderr(io.StringIO()):
            prepare(config.data, self.folder)
        return self.folder

    def new_folder(self) -> Path:
        """Create an empty folder."""
        folder = self.folder / f"run-{next(self._folders)}"
        folder.mkdir()
        return folder
