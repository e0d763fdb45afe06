"""Settings of every test and of every process that a test starts."""

import os
import signal
from collections.abc import Iterator

import pytest

# A change is usually tested before it is committed. Tests of the rule itself remove this variable.
os.environ["ALLOW_DIRTY"] = "y"
# A shell makes background processes and their children ignore SIGINT; restore the default.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """Restore torch's process-wide settings and RNG state after the test."""
    # Imported here because most tests need no torch.
    import torch

    from lib.runs.rng import rng_state, set_rng_state

    state, threads = rng_state(torch.device("cpu")), torch.get_num_threads()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    matmul, tf32 = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    benchmark = torch.backends.cudnn.benchmark
    yield
    set_rng_state(state, torch.device("cpu"))
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = fill
    torch.set_float32_matmul_precision(matmul)
    torch.backends.cudnn.allow_tf32 = tf32
    torch.backends.cudnn.benchmark = benchmark
