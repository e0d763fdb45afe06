"""Between log lines, the host reads nothing from the device: a read would stall a GPU."""

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.training.loop import train_step
from gpt2.training.metrics import MetricsLog
from gpt2.training.state import TrainingSession
from lib.config.field import SymbolValue
from tests.gpt2.training.conftest import SPARSE

aten = torch.ops.aten
# Operations whose result, or the shape of whose result, is a value of the device.
READS = {
    *(aten._local_scalar_dense, aten.is_nonzero, aten.equal, aten.nonzero, aten.masked_select),
    *(aten._unique2, aten.unique_dim, aten.repeat_interleave, aten.bincount),
}


# Methods that copy to the host, which on a CPU dispatch no operation. Not numpy(), which torch
# refuses for a tensor of a GPU.
COPIES = {torch.Tensor.tolist, torch.Tensor.cpu}


class HostCopies(TorchFunctionMode):
    """Names of the called methods that copy values of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COPIES:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """Names of the operations that read values of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record reads, and indices that are masks: their number is a value of the device."""
        masks = func.overloadpacket in (aten.index, aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in READS or masks:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def reads(session: TrainingSession) -> list[str]:
    """Return the reads of two steps after the first."""
    session.model.train()
    log, batches = MetricsLog(session), session.batches()
    train_step(session, next(batches), log)
    micro_batches = [next(batches) for _ in range(2)]
    with HostReads() as observed, HostCopies() as copies:
        for each in micro_batches:
            train_step(session, each, log)
    return observed.names + copies.names


CASES: dict[str, dict[str, SymbolValue | None]] = {
    "adamwspam, magnitude pruning": {},
    "reciprocal, learned temperature, dropout": {"RECIPROCAL": True, "MLP_ATTN_GATE": True},
    "latent projection": {"ATTENTION_PROJECTION_LATENT": True, "LATENT_DIM": 8},
    "sliding": {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 4},
    "nsa": SPARSE,
    "adamw": {"OPTIMIZER_ADAMWSPAM": None, "OPTIMIZER_ADAMW": True},
    "muon": {"OPTIMIZER_ADAMWSPAM": None, "OPTIMIZER_MUON": True},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_read_nothing_from_the_device(session, case):
    changes = {"LOG_INTERVAL": 100, "PRUNING_FREQUENCY": 100, "CHECK_NUMERICS": False}
    assert reads(session(**changes, **CASES[case])) == []


@pytest.mark.parametrize(
    "changes", [{"LOG_INTERVAL": 1}, {"LOG_INTERVAL": 100, "CHECK_NUMERICS": True}]
)
def test_a_read_is_noticed(session, changes):
    assert reads(session(PRUNING_FREQUENCY=100, **changes))
