"""Description of a run: observed settings, header line, entries of the manifest.

The settings that affect speed, memory or last bits are read back from torch and compared with the
configuration.
"""

import hashlib
import json
import platform
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from gpt2.attention.components import CustomAttention
from gpt2.attention.sdpa import BACKENDS
from gpt2.attention.sdpa_kernels import (
    KERNELS,
    allowed_kernels,
    observed_sdpa_kernel,
    selected_sdpa_kernel,
)
from gpt2.attention.triton import place_of
from gpt2.data.loader import batch_iterable
from gpt2.loss import fused_loss
from gpt2.model import initial_weights_stream
from gpt2.nsa.options import NsaOptions, resolve_backend
from gpt2.records.files import read_settings
from gpt2.training.rng import ALGORITHMS, POLICY, dropout_seed, rng_digests
from gpt2.training.state import TrainingSession
from lib.env.hardware import hardware
from lib.env.observe import (
    Setting,
    deviations,
    machine_settings,
    setting,
)
from lib.env.packages import installed_packages
from lib.env.process_group import DDP_SAFE_BUCKET_MIB
from lib.env.sharded import is_sharded
from lib.env.snapshot import observed_environment
from lib.runs.checkpoint import state_digest, weights_digest
from lib.runs.seeds import stream_seed
from lib.units import MIB

# Defaults of torch.compile, never changed here.
_COMPILER = {"backend": "inductor", "mode": "default", "options": None}
# Default of DistributedDataParallel.
_DEFAULT_BUCKET_MIB = 25


def observed_settings(session: TrainingSession) -> dict[str, Setting]:
    """Return the settings of machine, compiler, attention, memory and loader, by name."""
    machine, resolved = session.config.machine, session.config.model.grad_checkpointing
    return {
        **machine_settings(machine, session.device, session.group.process, session.scaler),
        **_compiler(session),
        **_gradient_exchange(session),
        **_attention(session),
        "gradient_checkpointing_enabled": _state(resolved, session.model.grad_checkpointing),
        # Fixed: recomputation always uses the same dropout masks.
        "checkpoint_preserve_rng_state": _state(True, True),
        "checkpoint_use_reentrant": _state(False, False),
        # Of training, which is never quantized.
        "quantization_enabled": _state(False, False),
        "quantization_scheme": _state("none", "none"),
        **_loader(session),
    }


def _compiler(session: TrainingSession) -> dict[str, Setting]:
    machine, forward = session.config.machine, session.forward
    if isinstance(forward, DistributedDataParallel):
        forward = forward.module
    # By name: importing the class from torch._dynamo takes seconds.
    compiled = type(forward).__name__ == "OptimizedModule"
    resolved, observed = (_COMPILER if on else {} for on in (machine.compile, compiled))
    steps = machine.warmup_iterations
    return {
        "torch_compile_enabled": setting(machine.compile, machine.compile, lambda: compiled),
        **{
            f"torch_compile_{name}": _state(resolved.get(name), observed.get(name))
            for name in _COMPILER
        },
        "compile_warmup_steps": _state(steps, steps),
    }


def _gradient_exchange(session: TrainingSession) -> dict[str, Setting]:
    """Return how ranks share the model, and the settings of DDP; null values without it."""
    machine, forward = session.config.machine, session.forward
    requested, mode, mib, copied = machine.ddp_safe, "none", None, None
    if isinstance(forward, DistributedDataParallel):
        mode = "ddp"
        mib, copied = forward.bucket_bytes_cap / MIB, not forward.gradient_as_bucket_view
    elif is_sharded(next(session.model.parameters())):
        mode = "fsdp"
    resolved_mode = machine.data_parallel if session.group.size > 1 else "none"
    uses_ddp = resolved_mode == "ddp"
    resolved = DDP_SAFE_BUCKET_MIB if requested else _DEFAULT_BUCKET_MIB
    return {
        "data_parallel": _state(resolved_mode, mode, machine.data_parallel),
        "ddp_bucket_cap_mib": _state(resolved if uses_ddp else None, mib, requested),
        "ddp_gradients_copied": _state(True if uses_ddp else None, copied, requested),
    }


def _attention(session: TrainingSession) -> dict[str, Setting]:
    """Return the attention backend of all blocks and, for SDPA, the kernel of each distinct shape.

    Resolved is the kernel that torch reports it will select, observed the kernel that ran.
    """
    model, device = session.config.model, session.device
    requested, shape = model.attention.backend, model.shape
    forms = sorted({block.attn.backend for block in session.model.blocks})
    chosen = model.backends(place_of(device, torch.float32))
    selected: dict[str, str] = {}
    observed: dict[str, str] = {}
    allowed: tuple[list[str], list[str]] = ([], [])
    if "sdpa" in forms:
        allowed = (
            [requested] if requested in BACKENDS else sorted(KERNELS),
            allowed_kernels(requested),
        )
        # Training, and evaluation without dropout.
        for dropout in (shape.dropout, 0.0):
            name = f"{shape.n_head}x{shape.block_size}x{shape.head_dim}, dropout {dropout:g}"
            precision = session.config.machine.precision
            selected[name] = selected_sdpa_kernel(model, precision, device, dropout)
            observed[name] = observed_sdpa_kernel(model, precision, device, dropout)
    # Without a pinned kernel, torch's selection is the resolved setting.
    resolved = {
        name: requested if requested in BACKENDS else kernel for name, kernel in selected.items()
    }
    return {
        **_nsa_backend(session),
        **_loss_backend(session),
        "attention_impl": _state("+".join(sorted(chosen)), "+".join(forms), requested),
        "sdpa_backends_allowed": _state(*allowed, requested),
        "sdpa_backend_selected": _state(resolved, observed, requested),
        "flash_attention_enabled": _state(
            "flash" in resolved.values(), "flash" in observed.values(), requested
        ),
    }


def _loss_backend(session: TrainingSession) -> dict[str, Setting]:
    """Return that liger-kernel computes the loss; nothing for torch, as in earlier runs.

    A compiled model computes the loss by torch.
    """
    machine, requested = session.config.machine, session.config.model.loss_backend
    if machine.compile or not fused_loss(requested, session.device):
        return {}
    return {"loss_backend": _state("liger", "liger", requested)}


def _nsa_backend(session: TrainingSession) -> dict[str, Setting]:
    """Return the backend of the selected branch of native sparse attention."""
    options, device = session.config.model.attention.pattern, session.device.type
    if not isinstance(options, NsaOptions) or not options.branch_selected:
        # Recorded for every run, so that runs with and without the pattern are comparable.
        return {"nsa_backend": _state("none", "none")}
    patterns = [block.attn.pattern for block in session.model.blocks]
    kernels = {p.kernel(device) for p in patterns if isinstance(p, CustomAttention)}
    observed = "+".join(sorted(kernel.removeprefix("nsa by ") for kernel in kernels))
    return {"nsa_backend": _state(resolve_backend(options, device), observed, options.backend)}


def _loader(session: TrainingSession) -> dict[str, Setting]:
    """Return the settings of a loader built like the one in use, without starting its workers."""
    data, on_gpu = session.config.data, session.device.type == "cuda"
    loader = batch_iterable(session.sampler(), data, [], on_gpu)
    prefetches = data.loader_workers > 0
    return {
        "num_workers": _state(data.loader_workers, loader.num_workers),
        "pin_memory": _state(data.pin_memory and on_gpu, loader.pin_memory, data.pin_memory),
        "prefetch_factor": _state(
            data.prefetch_factor if prefetches else None,
            loader.prefetch_factor,
            data.prefetch_factor,
        ),
        "persistent_workers": _state(prefetches, loader.persistent_workers),
    }


def _state(resolved: Any, observed: Any, requested: Any = None) -> Setting:
    """Build a setting; ``requested`` defaults to the resolved value."""
    if requested is None:
        requested = resolved
    return {"requested": requested, "resolved": resolved, "observed": observed}


def startup_summary(session: TrainingSession) -> str:
    """Return the start line: device, memory, precision, kernels, threads, parameters, length."""
    machine = session.config.machine
    observed = hardware(session.device)
    on_gpu = session.device.type == "cuda"
    memory = observed["vram_gib"] if on_gpu else observed["ram_gib"]
    name = observed["gpu_name"] if on_gpu else observed["cpu_model"]
    options = {
        "compiled": machine.compile,
        "loss by liger-kernel": bool(_loss_backend(session)),
        "deterministic": machine.deterministic == "strict",
        "deterministic or warned": machine.deterministic == "warn",
        f"{machine.matmul_precision} fp32 products": machine.matmul_precision != "highest",
        "cudnn benchmark": machine.cudnn_benchmark,
    }
    budget = session.budget
    length = f"{budget.iterations:,} it x {budget.tokens_per_iteration:,} tokens"
    if budget.is_time:
        length = f"{budget.seconds:,.0f} s x {budget.tokens_per_iteration:,} tokens/it"
    parts = [
        session.config.repro.profile,
        f"{session.device} {name}, {memory:g} GiB",
        f"seed {session.config.seed}",
        machine.precision,
        f"attention {attention_kernel(session)}",
        *([f"{session.group.size} processes"] if session.group.size > 1 else []),
        f"{torch.get_num_threads()} thread(s)",
        *(option for option, on in options.items() if on),
        f"{sum(w.numel() for w in session.weights().values()):,} parameters",
        length + ("" if budget.stretch == 1.0 else f" (budget x {budget.stretch:g})"),
    ]
    return " | ".join(parts)


def attention_kernel(session: TrainingSession) -> str:
    """Return the attention kernel: by rows, triton, of the pattern, or of SDPA."""
    attention = session.model.blocks[0].attn
    if isinstance(attention.pattern, CustomAttention):
        return attention.pattern.kernel(session.device.type)
    if attention.backend == "rows":
        return "by rows"
    if attention.backend == "triton":
        return "triton"
    model, precision = session.config.model, session.config.machine.precision
    return f"sdpa {observed_sdpa_kernel(model, precision, session.device, model.shape.dropout)}"


def initial_manifest_entries(
    session: TrainingSession, rng_at_start: dict[str, list[str]]
) -> dict[str, Any]:
    """Return the manifest entries of the run: settings, identity, seeds, data and code.

    ``rng_at_start`` has the digests of the generator states before the first step.
    """
    config, train = session.config, session.config.train
    configured = session.configured
    settings = observed_settings(session)
    identity = f"{configured.digest}:{session.dataset.digest}"
    return {
        "knobs": settings,
        "deviations": deviations(settings),
        "run": {
            # Equal for every training of one configuration on the same data.
            "run_id": hashlib.sha256(identity.encode()).hexdigest()[:16],
            "run_profile": config.repro.profile,
            "hash8": configured.hash8,
        },
        "config": {"config_digest": configured.digest, **read_settings(session.run)},
        "origin": session.origin,
        "environment": _environment(session),
        "attention": {
            "backend_requested": config.model.attention.backend,
            "kernel": attention_kernel(session),
        },
        "batch": {
            "global_sequences": train.global_batch,
            "micro_batch": train.batch_size,
            "accumulation": train.grad_accumulation,
            "tokens_per_iteration": session.budget.tokens_per_iteration,
        },
        "processes": {
            "world_size": session.group.size,
            "backend": session.group.backend(session.device),
        },
        "seeds": {
            "seed": config.seed,
            "policy": POLICY,
            "dataloader_seed_policy": "sequence g depends on (seed, data, g); workers have no seed",
        },
        "rng": {"algorithms": ALGORITHMS, "streams": _streams(session)},
        "rng_state_at_start": rng_at_start,
        "rng_state_at_end": None,
        "debug_flags": config.numerics.flags,
        "init_weights_digest": session.init_digests,
        "final_weights_digest": None,
        "optimizer_state_digest": None,
        "data": session.dataset.manifest,
        "oom_fallbacks": session.oom_fallbacks,
        "earlier_divisions": session.earlier_divisions,
        "nondeterministic_ops_warned": None if session.nondeterministic_ops is None else [],
    }


def _environment(session: TrainingSession) -> dict[str, Any]:
    return {
        "python_version": platform.python_version(),
        "platform": platform.platform(),
        "torch_git": torch.version.git_version,
        "cudnn_version": torch.backends.cudnn.version(),
        "packages": installed_packages(),
        **observed_environment(session.run, session.config.environment.policy),
    }


def final_manifest_entries(session: TrainingSession) -> dict[str, Any]:
    """Return the manifest entries of the end of training. Must be called on every rank."""
    return {
        "rng_state_at_end": rng_digests_per_rank(session),
        "final_weights_digest": weights_digest(session.group.whole_state(session.weights())),
        "optimizer_state_digest": state_digest(
            session.group.whole_state(session.optimizer.state_dict())
        ),
        "nondeterministic_ops_warned": _warned_of_ranks(session),
    }


def rng_digests_per_rank(session: TrainingSession) -> dict[str, list[str]]:
    """Return the digest of each generator's state per rank. Must be called on every rank."""
    ranks = [
        json.loads(text)
        for text in session.group.gather_text(json.dumps(rng_digests(session.device)))
    ]
    return {name: [digests[name] for digests in ranks] for name in ranks[0]}


def _warned_of_ranks(session: TrainingSession) -> list[str] | None:
    """Return the operations torch warned of on any rank; None if warnings were not enabled."""
    if session.nondeterministic_ops is None:
        return None
    texts = session.group.gather_text(json.dumps(session.nondeterministic_ops.names))
    return sorted({name for text in texts for name in json.loads(text)})


def _streams(session: TrainingSession) -> dict[str, int | list[int] | dict[str, int]]:
    """Return the derived seed of each named stream; for dropout, one seed per rank."""
    seed = session.config.seed
    names = ("data", "numpy", "python", "sample")
    return {
        **{name: stream_seed(seed, name) for name in names},
        "dropout": [dropout_seed(seed, rank) for rank in range(session.group.size)],
        "init": {
            name: stream_seed(seed, initial_weights_stream(name, session.config.init.init_stream))
            for name in session.weights()
        },
    }
