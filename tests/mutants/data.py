"""Faults of the data: random tokens, another tokenizer, wrong batches."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from gpt2.check import process_checks as check
from gpt2.data import dataset, loader
from gpt2.data.dataset import PreparedDataset, TokenSplit
from gpt2.data.own_files import OwnText
from lib.errors import DataError
from tests.mutants.mutant import Mutant, Plant, replaced, then

_QUICKSTART = "gpt2-ratio-small"
TEXT = {"DATASET_CUSTOM": True, "CUSTOM_PATH": "text", "CUSTOM_FORMAT_BIN": True}


class _Random(TokenSplit):
    """A split of random tokens."""

    def __init__(self) -> None:
        self.name = "train"

    n_tokens = 10_000

    def window(self, offset: int, length: int) -> np.ndarray:
        return np.random.default_rng(offset).integers(0, 256, length, dtype=np.uint16)


def _invented(right: Any) -> Any:
    """Return random tokens if no data is prepared."""

    def open_dataset(*given: Any, **named: Any) -> Any:
        try:
            return right(*given, **named)
        except DataError:
            return PreparedDataset(_Random(), _Random(), {})

    return open_dataset


def _opened(make: Any) -> Plant:
    """Return a plant that replaces open_dataset in its module and in the check."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        wrong = make(dataset.open_dataset)
        patch.setattr(dataset, "open_dataset", wrong)
        patch.setattr(check, "open_dataset", wrong)

    return plant


def _unshifted(out: Any, *given: Any) -> Any:
    x_BT, _, offsets_B = out
    return x_BT, x_BT.clone(), offsets_B


def _short(out: Any, *given: Any) -> Any:
    x_BT, y_BT, offsets_B = out
    return x_BT[:, :-1], y_BT[:, :-1], offsets_B


MUTANTS = (
    Mutant(
        "missing data becomes random tokens",
        "baseline",
        {"data": "no-substitute-data"},
        _opened(_invented),
        quick=True,
    ),
    Mutant(
        "tokens of another tokenizer",
        "baseline",
        {"data": "token-range"},
        then(TokenSplit, "window", lambda out, *given: out + np.uint16(300)),
        _QUICKSTART,
        TEXT,
    ),
    Mutant(
        "targets are not shifted",
        "baseline",
        {"data": "shifted-targets"},
        then(loader._Windows, "__getitem__", _unshifted),
        _QUICKSTART,
        TEXT,
    ),
    Mutant(
        "batches are too short",
        "baseline",
        {"data": ("batch-shape", r"\(\d+, 128\)\); \(\(\d+, 127\)")},
        then(loader._Windows, "__getitem__", _short),
        _QUICKSTART,
        TEXT,
    ),
    Mutant(
        "manifest does not match the data",
        "baseline",
        {"data": ("intact-data", r"\[data\.damaged\]")},
        replaced(dataset, "manifest_digest", lambda _: lambda manifest: "0" * 64),
        _QUICKSTART,
        TEXT,
    ),
    Mutant(
        "a hash decides beside held-out files",
        "baseline",
        {"evaluated": "evaluation-windows", "paired": "paired-data"},
        then(
            OwnText,
            "documents",
            lambda out, *given: (replace(d, held_out=d.held_out or None) for d in out),
        ),
    ),
)
