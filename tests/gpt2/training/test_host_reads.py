"""Between log lines, the host reads nothing from the device: a read would stall a GPU."""

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.training.loop import train_step
from gpt2.training.metrics import MetricsLog
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

    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in COPIES:
            self.names.append(func.__name__)
        return func(*args, **(kwargs or {}))


class HostReads(TorchDispatchMode):
    """Names of the operations that read values of the device."""

    def __init__(self, names):
        super().__init__()
        self.names = names

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Record reads, and indices that are masks: their number is a value of the device."""
        masks = func.overloadpacket in (aten.index, aten.index_put_) and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if func.overloadpacket in READS or masks:
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))


QUIET = {"LOG_INTERVAL": 100, "PRUNING_FREQUENCY": 100, "CHECK_NUMERICS": False}
ANEW = {"OPTIMIZER_ADAMWSPAM": None}
CASES = {
    "adamwspam, magnitude pruning": {},
    "reciprocal, learned temperature, dropout": {"RECIPROCAL": True, "MLP_ATTN_GATE": True},
    "latent projection, sgd": {
        "ATTENTION_PROJECTION_LATENT": True,
        "LATENT_DIM": 8,
        **ANEW,
        "OPTIMIZER_SGD": True,
    },
    "sliding": {"ATTENTION_PATTERN_SLIDING": True, "SLIDING_WINDOW": 4},
    "nsa": SPARSE,
    "adamw": {**ANEW, "OPTIMIZER_ADAMW": True},
    "muon": {**ANEW, "OPTIMIZER_MUON": True},
    "a read by each log line": {"LOG_INTERVAL": 1},
    "a read by each check": {"CHECK_NUMERICS": True},
}


@pytest.mark.parametrize("case", CASES)
def test_steps_read_nothing_from_the_device(session, case):
    opened, names = session(**QUIET | CASES[case]), []
    opened.model.train()
    log, batches = MetricsLog(opened), opened.batches()
    train_step(opened, next(batches), log)
    micro_batches = [next(batches) for _ in range(2)]
    with HostReads(names), HostCopies(names):
        for each in micro_batches:
            train_step(opened, each, log)
    assert bool(names) is case.startswith("a read")
