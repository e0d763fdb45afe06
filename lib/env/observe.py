"""Settings read back from torch, the kernel of attention, and non-deterministic operations."""

import os
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.attention import SDPBackend

from lib.env.machine import WORKSPACE, WORKSPACE_VARIABLE, autocast
from lib.env.options import MachineConfig
from lib.env.ranks import ProcessRank, missing_variables
from lib.errors import PreflightError, Problem

# Three states of a setting: requested, resolved, observed.
Setting = dict[str, Any]
_ADVICE = (
    "paper_repro allows no deviation; type: SET=RUN_PROFILE_MAXOUT_SPEED=y to record it instead"
)


def setting(requested: Any, resolved: Any, read: Callable[[], Any]) -> Setting:
    """Return a setting in three states: requested, resolved for this machine, and read back."""
    try:
        observed = read()
    # torch raises it for old TF32 switches once new ones were set.
    except RuntimeError as error:
        observed = f"unreadable: {error}"
    return {"requested": requested, "resolved": resolved, "observed": observed}


def machine_settings(
    machine: MachineConfig, device: torch.device, process: ProcessRank, scaler: torch.amp.GradScaler
) -> dict[str, Setting]:
    """Return the settings of the machine and of torch, by name."""
    products, tf32 = machine.matmul_precision, machine.matmul_precision != "highest"
    cuda, cudnn, precision = torch.backends.cuda, torch.backends.cudnn, machine.precision
    deterministic = "warn_only" if machine.deterministic == "warn" else machine.repeats
    on_gpu = device.type == "cuda"
    workspace = WORKSPACE if on_gpu and machine.repeats else None
    # Name → requested, and how it is read back.
    settings: dict[str, tuple[Any, Callable[[], Any]]] = {
        "precision_mode": (precision, lambda: _precision(machine)),
        "amp_enabled": (precision != "fp32", lambda: _precision(machine) != "fp32"),
        "grad_scaler_enabled": (precision == "fp16", scaler.is_enabled),
        "cpu_threads": (machine.cpu_threads, torch.get_num_threads),
        "world_size": (process.world_size, _world_size),
        "float32_matmul_precision": (products, torch.get_float32_matmul_precision),
        "cudnn_benchmark": (machine.cudnn_benchmark, lambda: cudnn.benchmark),
        "fill_uninitialized_memory": (
            False,
            # A property that torch adds to the class of the module.
            lambda: torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
        ),
    }
    if on_gpu:
        segments = machine.expandable_segments
        missing = partial(missing_variables, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})
        settings["expandable_segments"] = (segments, lambda: not missing())
    found = {name: setting(value, value, read) for name, (value, read) in settings.items()}
    # None if this run does not use it.
    read_workspace = partial(os.environ.get, WORKSPACE_VARIABLE) if workspace else lambda: None
    requested = machine.deterministic

    def read_deterministic() -> bool | str:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        return "warn_only" if warns else torch.are_deterministic_algorithms_enabled()

    def read_device() -> str:
        on = torch.cuda.is_initialized()
        return f"cuda:{torch.cuda.current_device()}" if on else "cpu"

    return found | {
        "device": setting(machine.device, str(device), read_device),
        "allow_tf32_matmul": setting(products, tf32, lambda: cuda.matmul.allow_tf32),
        "allow_tf32_cudnn": setting(products, tf32, lambda: cudnn.allow_tf32),
        "deterministic_algorithms": setting(requested, deterministic, read_deterministic),
        "cublas_workspace_config": setting(requested, workspace, read_workspace),
    }


def deviations(settings: Mapping[str, Setting]) -> list[str]:
    return [name for name, state in settings.items() if state["resolved"] != state["observed"]]


def require_no_deviations(settings: Mapping[str, Setting]) -> None:
    """Raise PreflightError listing every deviation with both values."""
    problems = [
        f"{name}: setting differs (expected {settings[name]['resolved']}, "
        f"got {settings[name]['observed']})"
        for name in deviations(settings)
    ]
    if problems:
        code = "machine.setting-mismatch"
        raise PreflightError(*(Problem(what, next=_ADVICE, code=code) for what in problems))


def selected_sdpa_backend(
    q_BNTH: torch.Tensor, kv_heads: int, dropout: float, seen: Mapping[str, Any]
) -> str:
    """Return the kernel torch selects for attention with the masks ``seen``. Raises RuntimeError if none."""
    batch, heads, length, width = q_BNTH.shape
    k, v = (q_BNTH.new_empty(batch, kv_heads, length, width).requires_grad_() for _ in "kv")
    with warnings.catch_warnings():
        # torch warns about each kernel that it cannot select.
        warnings.simplefilter("ignore")
        choice = torch._fused_sdp_choice(
            q_BNTH, k, v, dropout_p=dropout, enable_gqa=kv_heads < heads, **seen
        )
    return SDPBackend(choice).name.lower().removesuffix("_attention")


def _precision(machine: MachineConfig) -> str:
    """Return the precision of a matrix product in the context of the forward pass."""
    with autocast(machine):
        if not torch.is_autocast_enabled(machine.device):
            return "fp32"
        dtype = torch.get_autocast_dtype(machine.device)
    return {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]


def _world_size() -> int:
    """Return the size of the joined process group, or 1 if there is none."""
    joined = dist.is_available() and dist.is_initialized()
    return dist.get_world_size() if joined else 1


_FUSED = re.compile(r"ScaledDotProduct(\w+?)Attention")


def detect_sdpa_kernel(context: Tensor) -> str:
    """Return flash, efficient, cudnn or math, or "unknown" if neither is in the graph of autograd.

    ``context`` is the output of scaled_dot_product_attention and must require a gradient. A profile
    takes over a second to start and writes to the log of the run.
    """
    kernel, nodes = "unknown", [context.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None:
            continue
        if fused := _FUSED.search(node.name()):
            return fused[1].lower()
        if "Softmax" in node.name():
            kernel = "math"
        nodes += [parent for parent, _ in node.next_functions]
    return kernel


# Wording of torch for an operation, a fused attention kernel and a product without a workspace.
_WARNING = (
    r"(?P<name>.+?) (does not have a deterministic implementation"
    r"|defaults to a non-deterministic algorithm)"
    r"|.*not deterministic because it uses (?P<library>CuBLAS)"
)


class NondeterministicOperations:
    """Names of non-deterministic operations; ``report`` is called with each new name."""

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._names: set[str] = set()

    @property
    def names(self) -> list[str]:
        return sorted(self._names)

    def add(self, names: Iterable[str]) -> None:
        self._names.update(names)

    def meet(self, message: str) -> bool:
        """Record the operation if ``message`` is such a warning; return whether it is."""
        match = re.match(_WARNING, message, re.DOTALL)
        if match is None:
            return False
        name = match["name"] or match["library"]
        if name not in self._names:
            self._names.add(name)
            self._report(name)
        return True


@contextmanager
def record_nondeterminism(
    machine: MachineConfig, report: Callable[[str], None]
) -> Iterator[NondeterministicOperations | None]:
    """Record such warnings of torch inside the context instead of printing them.

    Yields None unless ``DETERMINISTIC`` is warn. torch emits some warnings once per process, and
    Python once per location; inside, each is emitted every time.
    """
    if machine.deterministic != "warn":
        yield None
        return
    operations, warn_always = NondeterministicOperations(report), torch.is_warn_always_enabled()
    with warnings.catch_warnings():
        warnings.filterwarnings("always", message=_WARNING)
        showwarning = warnings.showwarning

        def show(message: Warning | str, *where: Any, **more: Any) -> None:
            if not operations.meet(str(message)):
                showwarning(message, *where, **more)

        warnings.showwarning = show
        torch.set_warn_always(True)
        try:
            yield operations
        finally:
            torch.set_warn_always(warn_always)
