"""Description of a run: the log line at its start, and the manifest entries."""

import hashlib
import json
from typing import Any

import torch

from gpt2.attention.own import OwnAttention
from gpt2.attention.sdpa import kernel_at_work
from gpt2.config import Config
from gpt2.runs import read_settings
from gpt2.training.observe import run_knobs
from gpt2.training.session import Session
from lib.environment.record import observed_environment
from lib.machine.observe import deviations, hardware
from lib.repro.manifest import environment
from lib.repro.rng import ALGORITHMS, POLICY, dropout_seed, rng_digests
from lib.repro.streams import stream_seed
from lib.repro.weights import state_digest, weights_digest


def start_line(session: Session) -> str:
    """Return the start line: device, memory, precision, kernels, threads, parameters, length."""
    machine = session.config.machine
    observed = hardware(session.device)
    on_gpu = session.device.type == "cuda"
    memory = observed["vram_gib"] if on_gpu else observed["ram_gib"]
    name = observed["gpu_name"] if on_gpu else observed["cpu_model"]
    options = {
        "compiled": machine.compile,
        "deterministic": machine.deterministic == "strict",
        "deterministic or warned": machine.deterministic == "warn",
        f"{machine.matmul_precision} fp32 products": machine.matmul_precision != "highest",
        "cudnn benchmark": machine.cudnn_benchmark,
    }
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
        _length(session),
    ]
    return " | ".join(parts)


def attention_kernel(session: Session) -> str:
    """Return the attention kernel: by rows, joined, of the pattern, or of SDPA."""
    attention = session.model.h[0].attn
    if isinstance(attention.pattern, OwnAttention):
        return attention.pattern.kernel(session.device.type)
    form = attention.form(session.device.type)
    if form == "rows":
        return "by rows"
    if form == "joined":
        return "joined, flex" if session.device.type == "cuda" else "joined, all pairs"
    model, precision = session.config.model, session.config.machine.precision
    return f"sdpa {kernel_at_work(model, precision, session.device, model.shape.dropout)}"


def manifest_facts(session: Session, rng_at_start: dict[str, list[str]]) -> dict[str, Any]:
    """Return the manifest entries of the run: settings, identity, seeds, data and code.

    ``rng_at_start`` has the digests of the generator states before the first step.
    """
    config, train = session.config, session.config.train
    # Not session.config: an out-of-memory fallback may have changed the micro-batch there.
    configured = Config.from_values(config.values)
    settings = run_knobs(session)
    return {
        "knobs": settings,
        "deviations": deviations(settings),
        "run": {
            "run_id": _run_id(configured.digest, session.dataset.digest),
            "run_profile": config.repro.profile,
            "hash8": configured.hash8,
        },
        "config": {"config_digest": configured.digest, **read_settings(session.run)},
        "origin": session.origin,
        "environment": environment() | observed_environment(session.run, config.environment.policy),
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
        "nondeterministic_ops_warned": None if session.warned is None else [],
    }


def closing_facts(session: Session) -> dict[str, Any]:
    """Return the manifest entries of the end of training. Must be called on every rank."""
    return {
        "rng_state_at_end": rng_of_ranks(session),
        "final_weights_digest": weights_digest(session.weights()),
        "optimizer_state_digest": state_digest(session.optimizer.state_dict()),
        "nondeterministic_ops_warned": _warned_of_ranks(session),
    }


def rng_of_ranks(session: Session) -> dict[str, list[str]]:
    """Return the digest of each generator's state per rank. Must be called on every rank."""
    local = rng_digests(session.device)
    digests = bytearray(b"".join(bytes.fromhex(digest) for digest in local.values()))
    rows = session.group.gather(torch.frombuffer(digests, dtype=torch.uint8)).tolist()
    width = hashlib.sha256().digest_size
    return {
        name: [bytes(row[i * width : (i + 1) * width]).hex() for row in rows]
        for i, name in enumerate(local)
    }


def _warned_of_ranks(session: Session) -> list[str] | None:
    """Return the operations torch warned of on any rank; None if warnings were not enabled."""
    if session.warned is None:
        return None
    texts = session.group.gather_text(json.dumps(session.warned.names))
    return sorted({name for text in texts for name in json.loads(text)})


def _run_id(config_digest: str, data_digest: str) -> str:
    """Return an id that is equal for every training of one configuration on the same data."""
    return hashlib.sha256(f"{config_digest}:{data_digest}".encode()).hexdigest()[:16]


def _streams(session: Session) -> dict[str, int | list[int] | dict[str, int]]:
    """Return the derived seed of each named stream; for dropout, one seed per rank."""
    seed = session.config.seed
    names = ("data", "numpy", "python", "sample")
    return {
        **{name: stream_seed(seed, name) for name in names},
        "dropout": [dropout_seed(seed, rank) for rank in range(session.group.size)],
        "init": {name: stream_seed(seed, f"init/{name}") for name in session.weights()},
    }


def _length(session: Session) -> str:
    tokens, stretch = session.budget.tokens_per_iteration, session.budget.stretch
    suffix = "" if stretch == 1.0 else f" (budget x {stretch:g})"
    if session.budget.is_time:
        return f"{session.budget.seconds:,.0f} s x {tokens:,} tokens/it{suffix}"
    return f"{session.budget.iterations:,} it x {tokens:,} tokens{suffix}"
