"""For every test, and every process that one starts."""

import os
import signal
from collections.abc import Iterator

import pytest

# Whoever tests a change has not committed it yet. A test of that very rule takes it away again.
os.environ["DIRTY"] = "y"
# A shell that starts the tests in the background has them, and all they start, ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """torch's settings and draws are the process's own: leave them as they were found."""
    # Most tests do without.
    import torch

    from lib.repro.rng import rng_state, set_rng_state

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
