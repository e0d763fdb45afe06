"""Settings of every test and of every process that a test starts, and the fast tier.

``--fast`` (make test FAST=1) leaves out

* the tests marked slow, and those of whole commands in tests/integration,
* of a parametrized test, all but the first case,
* each test from the moment at which it starts a Python interpreter or make: importing torch anew
  takes longer than a hundred other tests.
"""

import fcntl
import gc
import multiprocessing.util
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial, partialmethod
from multiprocessing.util import spawnv_passfds
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest

from lib.env.machine import MALLOC_VARIABLES, SHARDED_MALLOC_VARIABLES, SPIN_VARIABLE
from lib.make_variables import EXPORTED, GIVEN, TARGET
from tests.command_server import CommandServer

# A change is usually tested before it is committed. Tests of the rule itself remove this variable.
os.environ["ALLOW_DIRTY"] = "y"
# A shell makes background processes and their children ignore SIGINT; restore the default.
signal.signal(signal.SIGINT, signal.default_int_handler)
# git sets these for a hook that runs the tests; they would select this repository in every other one.
for _name in [name for name in os.environ if name.startswith("GIT_")]:
    del os.environ[_name]
# Variables of the make that runs the tests are not those of the commands that they run.
for _name in ("FAST", TARGET, GIVEN, EXPORTED):
    os.environ.pop(_name, None)
# Several tests share each core, and threads that wait for others spin: one thread is several times
# faster than two.
os.environ["OMP_NUM_THREADS"] = "1"
# No test survives a crash of the machine, and a fabricated run waits for the disk six times.
os.fsync = lambda descriptor: None
# Hundreds of processes would each compile the product.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False


# Files whose tests take longest, the longest first.
LONGEST = (
    "test_worked_examples",
    "test_slurm",
    "test_reproduce",
    "test_kill",
    "test_trained",
    "test_verify_results",
)
# The same examples in each run, on a machine of any speed; what fails is in the message.
hypothesis.settings.register_profile(
    "tests",
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")

NOT_FAST = "starts a Python interpreter: not in the fast tier"
# The processes in which a test is running; a child of os.fork() is not one of them.
_running: set[int] = set()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out slow tests and processes")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("fast"):
        # An audit hook would be called for each opened file as well.
        subprocess.Popen.__init__ = partialmethod(_skip_at_interpreter, subprocess.Popen.__init__)
        multiprocessing.util.spawnv_passfds = partial(_skip_at_spawn, spawnv_passfds)
        CommandServer.start = _skip_at_command


# Optional: tests of faults run pytest without xdist.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return one worker for each core, and two more if tests run commands, for which they wait."""
    return len(os.sched_getaffinity(0)) + (0 if config.getoption("fast") else 2)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Sequence[Any]) -> None:
    """Fork the workers from the command server, which has loaded what they would load."""
    server = _server(config._tmp_path_factory.getbasetemp())
    config.add_cleanup(server.close)
    for spec in specs:
        if spec.popen and not spec.python:
            spec.python = shlex.quote(str(server.interpreter()))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Note that a test is running here: xdist starts its workers outside of tests."""
    _running.add(os.getpid())
    try:
        return (yield)
    finally:
        _running.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown() -> Generator[None, object, object]:
    """Fail a test that leaves torch with several threads, which would slow down all that follow."""
    outcome = yield
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != 1:
        torch.set_num_threads(1)
        pytest.fail("leaves torch with several threads: use torch_as_before", pytrace=False)
    return outcome


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Import the tests without a garbage collection, and traverse what they import in none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_sessionfinish() -> None:
    """Leave the objects of the tests out of pytest's five garbage collections at its end."""
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect slow tests, and all cases but the first, in the fast tier.

    Of the whole suite, each worker starts with slow tests, so that none is left with one at the end.
    """
    if not config.getoption("fast"):
        items[:] = _deal(items, int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")))
        return
    first: dict[str, pytest.Item] = {}
    for item in items:
        if not _is_slow(item):
            first.setdefault(item.nodeid.partition("[")[0], item)
    selected = set(first.values())
    config.hook.pytest_deselected(items=[item for item in items if item not in selected])
    items[:] = first.values()


def _is_slow(item: pytest.Item) -> bool:
    """Return whether a test is marked slow or runs commands."""
    return item.get_closest_marker("slow") is not None or "integration" in item.path.parts


def _deal(items: Sequence[pytest.Item], workers: int) -> list[pytest.Item]:
    """Return the items in the order in which each worker's equal part begins with slow files.

    xdist divides the list into such parts, and a worker without tests takes the end of another's part.
    A file stays whole, so that one worker imports its libraries and sets up its fixtures.
    """
    slow = {item.path for item in items if _is_slow(item)}
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        if item.path in slow:
            files.setdefault(item.path, []).append(item)
    longest = [path for name in LONGEST for path in files if path.stem == name]
    order = [*longest, *(path for path in files if path not in longest)]
    quick = [item for item in items if item.path not in slow]
    dealt = []
    for worker in range(workers):
        part = [item for path in order[worker::workers] for item in files[path]]
        count = len(items) * (worker + 1) // workers - len(dealt) - len(part)
        dealt += part + quick[:count]
        del quick[:count]
    return dealt


def _skip_at_interpreter(
    process: subprocess.Popen, start: Callable[..., None], args: Any, *rest: Any, **named: Any
) -> None:
    """Skip the running test if it starts a Python interpreter, or make other than for a dry run.

    A child of os.fork() is left alone: skipping there would run the rest of the tests twice.
    """
    words = [str(args)] if isinstance(args, str | Path) else [str(w) for w in args]
    name = Path(words[0]).name
    dry = name == "make" and words[1:2] == ["-n"]
    if os.getpid() in _running and (name.startswith("python") or (name == "make" and not dry)):
        pytest.skip(NOT_FAST)
    start(process, args, *rest, **named)


def _skip_at_command(server: CommandServer, *arguments: object, **named: object) -> NoReturn:
    """Skip the running test instead of starting a command."""
    pytest.skip(NOT_FAST)


def _skip_at_spawn(spawn: Callable[..., int], *arguments: object) -> int:
    """Skip the running test if multiprocessing starts an interpreter."""
    if os.getpid() in _running:
        pytest.skip(NOT_FAST)
    return spawn(*arguments)


def _fill_once(place: Path, name: str, fill: Callable[[Path], object]) -> Path:
    """Create and fill a folder below ``place`` unless another process has done so."""
    folder, done = place / name, place / f"{name}.done"
    with (place / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            fill(folder)
            done.touch()
    return folder


def _write_faults(place: Path) -> Path | None:
    """Compile write_faults.c, which does nothing unless a command has its variables."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    source = Path(__file__).parent / "integration" / "write_faults.c"
    name = "write_faults.so"

    def compile_in(folder: Path) -> None:
        command = [compiler, "-shared", "-fPIC", "-O1", "-o", str(folder / name), str(source)]
        subprocess.run([*command, "-ldl"], check=True)

    return _fill_once(place, "library", compile_in) / name


def _server(place: Path) -> CommandServer:
    """Return a client of the process that forks the commands of all tests, and the workers."""
    return CommandServer(_fill_once(place, "server", lambda folder: None), _write_faults(place))


@pytest.fixture(autouse=True)
def variables_of_workers_as_before() -> Iterator[None]:
    """Restore what a command that runs in this process sets for it: a manifest records it."""
    names = ("OMP_NUM_THREADS", SPIN_VARIABLE, *MALLOC_VARIABLES, *SHARDED_MALLOC_VARIABLES)
    before = {name: os.environ.get(name) for name in names}
    yield
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@pytest.fixture(scope="session")
def shared_place(tmp_path_factory) -> Path:
    """Return the folder of all workers."""
    place = tmp_path_factory.getbasetemp()
    return place.parent if "PYTEST_XDIST_WORKER" in os.environ else place


@pytest.fixture(scope="session")
def shared_folder(shared_place) -> Callable[[str, Callable[[Path], object]], Path]:
    """Return a function that creates and fills a folder once for the workers of all tests."""
    return partial(_fill_once, shared_place)


@pytest.fixture(scope="session")
def write_faults(shared_place) -> Path | None:
    """Return the library of write_faults.c."""
    return _write_faults(shared_place)


@pytest.fixture(scope="session")
def server(shared_place) -> Iterator[CommandServer]:
    """Return a client of the process that forks the commands of all tests."""
    server = _server(shared_place)
    yield server
    server.close()


@pytest.fixture
def forked_modules(server, monkeypatch) -> None:
    """Let the product fork its modules that run in a process of their own from the server."""
    monkeypatch.setattr(sys, "executable", str(server.interpreter()))


@pytest.fixture
def torch_as_before() -> Iterator[None]:
    """Restore torch's process-wide settings and RNG state after the test."""
    # Imported here because most tests need no torch.
    import torch

    from gpt2.training.rng import rng_state, set_rng_state

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
