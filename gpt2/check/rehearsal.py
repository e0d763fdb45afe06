"""A short run of the real trainer, in its own directory.

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
    """The trainer's log, which also records losses and the gradient norm."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.losses: list[float] = []
        self.gradient_norm = 0.0

    def add(self, measured: Measured, lr: float) -> None:
        """Record the loss of a step, and the gradient norm before clipping."""
        self.losses.append(measured.loss.item())
        self.gradient_norm = measured.gradient_norm.item()


class Rehearsal:
    """An open training session; ``build_dir`` contains the data, ``folder`` the run."""

    def __init__(self, config: Config, build_dir: Path, folder: Path) -> None:
        self._records = Records(RunDir(folder), lambda event: None)
        self.session = open_session(config, build_dir, self._records)
        self._log = Losses(self.session)
        self._batches = None

    @property
    def losses(self) -> list[float]:
        """Return the loss of every step so far, in nats."""
        return self._log.losses

    @property
    def gradient_norm(self) -> float:
        """Return the gradient norm of the last step, before clipping."""
        return self._log.gradient_norm

    def step(self, micro_batches: list[MicroBatch] | None = None) -> float:
        """Run the trainer's next step and return its loss.

        The step uses the run's own data unless ``micro_batches`` are given.
        """
        if micro_batches is None:
            # Start at the session's current iteration, which a resume may have changed.
            self._batches = self._batches or self.session.batches()
            micro_batches = next(self._batches)
        step(self.session, micro_batches, self._log)
        return self.losses[-1]

    def digest(self) -> str:
        """Return the SHA-256 of the bytes of all weights (hex)."""
        sha256 = hashlib.sha256()
        for name, weight in self.session.weights().items():
            sha256.update(name.encode())
            sha256.update(weight.contiguous().numpy().tobytes())
        return sha256.hexdigest()

    @torch.no_grad()
    def logits(self, idx_BT: Tensor) -> Tensor:
        """Return logits without dropout; the model is in training mode afterwards."""
        self.session.model.eval()
        logits: Tensor = self.session.model(idx_BT)
        self.session.model.train()
        return logits

    def close(self) -> None:
        """Close the run's files."""
        self._records.close()
