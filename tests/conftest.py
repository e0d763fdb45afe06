"""Settings of every test and of every process that a test starts, and the fast tier.

``--fast`` (make test FAST=1) leaves out the tests marked slow, and each test from the moment at which
it starts a Python interpreter or make: importing torch anew takes longer than a hundred other tests.
"""

import multiprocessing.util
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

# A change is usually tested before it is committed. Tests of the rule itself remove this variable.
os.environ["ALLOW_DIRTY"] = "y"
# A shell makes background processes and their children ignore SIGINT; restore the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
# The tier of the tests is no setting of the commands that they run.
os.environ.pop("FAST", None)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out slow tests and processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        sys.addaudithook(_skip_at_interpreter)
        multiprocessing.util.spawnv_passfds = _skip_at_process


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the slow tests in the fast tier."""
    if config.getoption("fast"):
        slow = [item for item in items if item.get_closest_marker("slow")]
        config.hook.pytest_deselected(items=slow)
        items[:] = [item for item in items if item not in slow]


def _skip_at_interpreter(event: str, arguments: tuple[object, ...]) -> None:
    """Skip the running test if it starts a Python interpreter, or make other than for a dry run."""
    if event != "subprocess.Popen":
        return
    executable, words = arguments[:2]
    command = [str(w) for w in words] if isinstance(words, Sequence) else []
    name = Path(str(executable)).name
    if name.startswith("python") or (name == "make" and command[1:2] != ["-n"]):
        _skip_at_process()


def _skip_at_process(*arguments: object) -> int:
    pytest.skip("starts a Python interpreter: not in the fast tier")


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
