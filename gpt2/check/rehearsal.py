"""A run of the real trainer, a few iterations long, in a folder of its own.

B micro-batch, T tokens.
"""

import hashlib
from pathlib import Path

import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.train import step
from gpt2.training.log import Log
from gpt2.training.records import Records
from gpt2.training.session import Session
from gpt2.training.start import open_session
from gpt2.training.passes import Measured, MicroBatch
from lib.rundir import RunDir


class Losses(Log):
    """The trainer's log, which keeps what it is given."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.losses: list[float] = []
        self.gradient_norm = 0.0

    def add(self, measured: Measured, lr: float) -> None:
        """Take note of a step's loss, and of the gradients' norm before clipping."""
        self.losses.append(measured.loss.item())
        self.gradient_norm = measured.gradient_norm.item()


class Rehearsal:
    """An open session and its batches; ``build_dir`` holds the data, ``folder`` the run."""

    def __init__(self, config: Config, build_dir: Path, folder: Path) -> None:
        self._records = Records(RunDir(folder), lambda event: None)
        self.session = open_session(config, build_dir, self._records)
        self._log = Losses(self.session)
        self._batches = None

    @property
    def losses(self) -> list[float]:
        """The loss of every step so far, in nats."""
        return self._log.losses

    @property
    def gradient_norm(self) -> float:
        """Of the last step, before clipping."""
        return self._log.gradient_norm

    def step(self, micro_batches: list[MicroBatch] | None = None) -> float:
        """The trainer's next step, on its own data or on ``micro_batches``; the loss."""
        if micro_batches is None:
            # Read from where the session stands, which a resume may have moved.
            self._batches = self._batches or self.session.batches()
            micro_batches = next(self._batches)
        step(self.session, micro_batches, self._log)
        return self.losses[-1]

    def digest(self) -> str:
        """SHA-256 of every weight's bytes (hex)."""
        found = hashlib.sha256()
        for name, weight in self.session.weights().items():
            found.update(name.encode())
            found.update(weight.contiguous().numpy().tobytes())
        return found.hexdigest()

    @torch.no_grad()
    def logits(self, idx_BT: Tensor) -> Tensor:
        """Logits without dropout; the model is left in training mode."""
        self.session.model.eval()
        logits: Tensor = self.session.model(idx_BT)
        self.session.model.train()
        return logits

    def close(self) -> None:
        """Close the run's files."""
        self._records.close()
