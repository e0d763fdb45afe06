"""Description of a run: its settings, read back from torch, header line, entries of the manifest."""

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
from gpt2.lora import CodedMatrix
from gpt2.loss import fused_loss
from gpt2.model import initial_weights_stream
from gpt2.nsa.options import NsaOptions, resolve_backend
from gpt2.quantized.options import quantization_fields
from gpt2.records.files import read_settings
from gpt2.training.rng import ALGORITHMS, POLICY, dropout_seed, rng_digests
from gpt2.training.state import TrainingSession
from lib.env.hardware import hardware
from lib.env.observe import Setting, deviations, machine_settings
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
# Name → requested, resolved and observed value.
_States = dict[str, tuple[Any, Any, Any]]


def observed_settings(session: TrainingSession) -> dict[str, Setting]:
    """Return the settings of machine, compiler, attention, memory and loader, by name."""
    recomputes = session.config.model.grad_checkpointing
    states: _States = {
        **_compiler(session),
        **_gradient_exchange(session),
        **_attention(session),
        "gradient_checkpointing_enabled": (
            *(recomputes, recomputes, session.model.grad_checkpointing),
        ),
        # Fixed: recomputation always uses the same dropout masks.
        "checkpoint_preserve_rng_state": (True, True, True),
        "checkpoint_use_reentrant": (False, False, False),
        **_quantization(session),
        **_loader(session),
    }
    names = ("requested", "resolved", "observed")
    return {
        **machine_settings(
            session.config.machine, session.device, session.group.process, session.scaler
        ),
        **{name: dict(zip(names, state, strict=True)) for name, state in states.items()},
    }


def _compiler(session: TrainingSession) -> _States:
    machine, forward = session.config.machine, session.forward
    if isinstance(forward, DistributedDataParallel):
        forward = forward.module
    # By name: importing the class from torch._dynamo takes seconds.
    compiled = type(forward).__name__ == "OptimizedModule"
    states: _States = {"torch_compile_enabled": (machine.compile, machine.compile, compiled)}
    for name, default in _COMPILER.items():
        resolved, observed = (default if on else None for on in (machine.compile, compiled))
        states[f"torch_compile_{name}"] = (resolved, resolved, observed)
    return states | {"compile_warmup_steps": (machine.warmup_iterations,) * 3}


def _quantization(session: TrainingSession) -> _States:
    """Return how the frozen matrices are stored; the fields of bitsandbytes only if it is used."""
    schemes = [part.base for part in session.config.model.adapters if part.base != "fp32"]
    stored = {m.scheme for m in session.model.modules() if isinstance(m, CodedMatrix)}
    requested, observed = (quantization_fields(*each) for each in (schemes, stored))
    names = [n for n in requested if not n.startswith("bnb") or requested[n] is not None]
    return {name: (requested[name], requested[name], observed[name]) for name in names}


def _gradient_exchange(session: TrainingSession) -> _States:
    """Return how ranks share the model, and the settings of DDP; null values without it."""
    machine, forward = session.config.machine, session.forward
    mode, mib, copied = "none", None, None
    if isinstance(forward, DistributedDataParallel):
        mode = "ddp"
        mib, copied = forward.bucket_bytes_cap / MIB, not forward.gradient_as_bucket_view
    elif is_sharded(next(session.model.parameters())):
        mode = "fsdp"
    resolved = machine.data_parallel if session.group.size > 1 else "none"
    size, safe = None, machine.ddp_safe
    if resolved == "ddp":
        size = DDP_SAFE_BUCKET_MIB if safe else _DEFAULT_BUCKET_MIB
    return {
        "data_parallel": (machine.data_parallel, resolved, mode),
        "ddp_bucket_cap_mib": (safe, size, mib),
        "ddp_gradients_copied": (safe, True if size else None, copied),
    }


def _attention(session: TrainingSession) -> _States:
    """Return the attention backend of all blocks and, for SDPA, the kernel of each distinct shape.

    Resolved is the kernel that torch reports it will select, observed the kernel that ran.
    """
    model, device, precision = (
        session.config.model,
        session.device,
        session.config.machine.precision,
    )
    requested, shape = model.attention.backend, model.shape
    forms = sorted({block.attn.backend for block in session.model.blocks})
    chosen = model.backends(place_of(device, torch.float32))
    resolved: dict[str, str] = {}
    observed: dict[str, str] = {}
    allowed: tuple[list[str], list[str]] = ([], [])
    if "sdpa" in forms:
        pinned = requested in BACKENDS
        allowed = ([requested] if pinned else sorted(KERNELS), allowed_kernels(requested))
        # Training, and evaluation without dropout.
        for dropout in (shape.dropout, 0.0):
            name = f"{shape.n_head}x{shape.block_size}x{shape.head_dim}, dropout {dropout:g}"
            # Without a pinned kernel, torch's selection is the resolved setting.
            selected = selected_sdpa_kernel(model, precision, device, dropout)
            resolved[name] = requested if pinned else selected
            observed[name] = observed_sdpa_kernel(model, precision, device, dropout)
    flash = ["flash" in kernels.values() for kernels in (resolved, observed)]
    return {
        **_nsa_backend(session),
        **_loss_backend(session),
        "attention_impl": (requested, "+".join(sorted(chosen)), "+".join(forms)),
        "sdpa_backends_allowed": (requested, *allowed),
        "sdpa_backend_selected": (requested, resolved, observed),
        "flash_attention_enabled": (requested, flash[0], flash[1]),
    }


def _loss_backend(session: TrainingSession) -> _States:
    """Return that liger-kernel computes the loss; nothing for torch, which a compiled model uses."""
    machine, requested = session.config.machine, session.config.model.loss_backend
    if machine.compile or not fused_loss(requested, session.device):
        return {}
    return {"loss_backend": (requested, "liger", "liger")}


def _nsa_backend(session: TrainingSession) -> _States:
    """Return the backend of the selected branch of native sparse attention."""
    options, device = session.config.model.attention.pattern, session.device.type
    if not isinstance(options, NsaOptions) or not options.branch_selected:
        # Recorded for every run, so that runs with and without the pattern are comparable.
        return {"nsa_backend": ("none", "none", "none")}
    patterns = [block.attn.pattern for block in session.model.blocks]
    kernels = {p.kernel(device) for p in patterns if isinstance(p, CustomAttention)}
    observed = "+".join(sorted(kernel.removeprefix("nsa by ") for kernel in kernels))
    return {"nsa_backend": (options.backend, resolve_backend(options, device), observed)}


def _loader(session: TrainingSession) -> _States:
    """Return the settings of a loader built like the one in use, without starting its workers."""
    data, on_gpu = session.config.data, session.device.type == "cuda"
    loader = session.loader().micro_batches
    workers, depth = data.loader_workers, data.prefetch_factor
    prefetches = workers > 0
    return {
        "num_workers": (workers, workers, loader.num_workers),
        "pin_memory": (data.pin_memory, data.pin_memory and on_gpu, loader.pin_memory),
        "prefetch_factor": (depth, depth if prefetches else None, loader.prefetch_factor),
        "persistent_workers": (prefetches, prefetches, loader.persistent_workers),
    }


def startup_summary(session: TrainingSession) -> str:
    """Return the start line: device, memory, precision, kernels, threads, parameters, length."""
    machine, budget = session.config.machine, session.budget
    observed, on_gpu = hardware(session.device), session.device.type == "cuda"
    memory, name = (
        observed[key] for key in (("vram_gib", "gpu_name") if on_gpu else ("ram_gib", "cpu_model"))
    )
    options = {
        f"{session.group.size} processes": session.group.size > 1,
        f"{torch.get_num_threads()} thread(s)": True,
        "compiled": machine.compile,
        "loss by liger-kernel": bool(_loss_backend(session)),
        "deterministic": machine.deterministic == "strict",
        "deterministic or warned": machine.deterministic == "warn",
        f"{machine.matmul_precision} fp32 products": machine.matmul_precision != "highest",
        "cudnn benchmark": machine.cudnn_benchmark,
    }
    length = f"{budget.iterations:,} it x {budget.tokens_per_iteration:,} tokens"
    if budget.is_time:
        length = f"{budget.seconds:,.0f} s x {budget.tokens_per_iteration:,} tokens/it"
    parts = [
        session.config.repro.profile,
        f"{session.device} {name}, {memory:g} GiB",
        f"seed {session.config.seed}",
        machine.precision,
        f"attention {attention_kernel(session)}",
        *(option for option, on in options.items() if on),
        f"{session.model.num_params():,} parameters",
        length + ("" if budget.stretch == 1.0 else f" (budget x {budget.stretch:g})"),
    ]
    return " | ".join(parts)


def attention_kernel(session: TrainingSession) -> str:
    """Return the attention kernel: by rows, triton, of the pattern, or of SDPA."""
    attention = session.model.blocks[0].attn
    if isinstance(attention.pattern, CustomAttention):
        return attention.pattern.kernel(session.device.type)
    if attention.backend in ("rows", "triton"):
        return {"rows": "by rows", "triton": "triton"}[attention.backend]
    model, precision = session.config.model, session.config.machine.precision
    return f"sdpa {observed_sdpa_kernel(model, precision, session.device, model.shape.dropout)}"


def initial_manifest_entries(
    session: TrainingSession, rng_at_start: dict[str, list[str]]
) -> dict[str, Any]:
    """Return the entries of the start; ``rng_at_start`` has the digests of the generators' states."""
    config, train, configured = session.config, session.config.train, session.configured
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
        "environment": {
            "python_version": platform.python_version(),
            "platform": platform.platform(),
            "torch_git": torch.version.git_version,
            "cudnn_version": torch.backends.cudnn.version(),
            "packages": installed_packages(),
            **observed_environment(session.run, config.environment.policy),
        },
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
        **_random_entries(session),
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


def _random_entries(session: TrainingSession) -> dict[str, Any]:
    """Return the seed, and the derived seed of each named stream; for dropout, one per rank."""
    seed = session.config.seed
    streams: dict[str, Any] = {
        name: stream_seed(seed, name) for name in ("data", "numpy", "python", "sample")
    }
    streams["dropout"] = [dropout_seed(seed, rank) for rank in range(session.group.size)]
    streams["init"] = {
        name: stream_seed(seed, initial_weights_stream(name, session.config.init.init_stream))
        for name in session.weights()
    }
    return {
        "seeds": {
            "seed": seed,
            "policy": POLICY,
            "dataloader_seed_policy": "sequence g depends on (seed, data, g); workers have no seed",
        },
        "rng": {"algorithms": ALGORITHMS, "streams": streams},
    }


def final_manifest_entries(session: TrainingSession) -> dict[str, Any]:
    """Return the manifest entries of the end of training. Must be called on every rank."""
    warned, whole_state = session.nondeterministic_ops, session.group.whole_state
    return {
        "rng_state_at_end": rng_digests_per_rank(session),
        "final_weights_digest": weights_digest(whole_state(session.weights())),
        "optimizer_state_digest": state_digest(whole_state(session.optimizer.state_dict())),
        # Of any rank; None if warnings were not enabled.
        "nondeterministic_ops_warned": (
            sorted({name for names in _of_ranks(session, warned.names) for name in names})
            if warned
            else None
        ),
    }


def rng_digests_per_rank(session: TrainingSession) -> dict[str, list[str]]:
    """Return the digest of each generator's state per rank. Must be called on every rank."""
    ranks = _of_ranks(session, rng_digests(session.device))
    return {name: [digests[name] for digests in ranks] for name in ranks[0]}


def _of_ranks(session: TrainingSession, value: Any) -> list[Any]:
    return [json.loads(text) for text in session.group.gather_text(json.dumps(value))]
