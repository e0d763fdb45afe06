"""What a run says of itself at its start: one line for people, facts for the manifest."""

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
    """Device, memory, precision, kernels, threads, and what the configuration came to."""
    machine = session.config.machine
    found = hardware(session.device)
    on_gpu = session.device.type == "cuda"
    memory = found["vram_gib"] if on_gpu else found["ram_gib"]
    name = found["gpu_name"] if on_gpu else found["cpu_model"]
    habits = {
        "compiled": machine.compile,
        "deterministic": machine.deterministic == "strict",
        "deterministic or noted": machine.deterministic == "warn",
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
        *(habit for habit, on in habits.items() if on),
        f"{sum(w.numel() for w in session.weights().values()):,} parameters",
        _length(session),
    ]
    return " | ".join(parts)


def attention_kernel(session: Session) -> str:
    """How scores are computed: by rows, joined, as the pattern does, or by the kernel that ran."""
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
    """What the manifest says beyond the machine: the run, its seeds, its data, its code.

    ``rng_at_start`` are the generators' digests before the first step.
    """
    config, train = session.config, session.config.train
    # Not the session's own, whose batches may have been divided anew to fit the memory.
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
            "dataloader_seed_policy": "sequence g is addressed by (seed, data, g); workers draw nothing",
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
    """What the manifest learns at the end of training; every rank has to call it."""
    return {
        "rng_state_at_end": rng_of_ranks(session),
        "final_weights_digest": weights_digest(session.weights()),
        "optimizer_state_digest": state_digest(session.optimizer.state_dict()),
        "nondeterministic_ops_warned": _warned_of_ranks(session),
    }


def rng_of_ranks(session: Session) -> dict[str, list[str]]:
    """Each generator's state as a digest, one for each rank; every rank has to call it."""
    own = rng_digests(session.device)
    digests = bytearray(b"".join(bytes.fromhex(digest) for digest in own.values()))
    rows = session.group.gather(torch.frombuffer(digests, dtype=torch.uint8)).tolist()
    width = hashlib.sha256().digest_size
    return {
        name: [bytes(row[i * width : (i + 1) * width]).hex() for row in rows]
        for i, name in enumerate(own)
    }


def _warned_of_ranks(session: Session) -> list[str] | None:
    """What torch warned of on any rank; None where it was not asked to."""
    if session.warned is None:
        return None
    told = session.group.gather_text(json.dumps(session.warned.names))
    return sorted({name for text in told for name in json.loads(text)})


def _run_id(config_digest: str, data_digest: str) -> str:
    """The same for every training of one configuration on the same data."""
    return hashlib.sha256(f"{config_digest}:{data_digest}".encode()).hexdigest()[:16]


def _streams(session: Session) -> dict[str, int | list[int] | dict[str, int]]:
    """Each named stream with the seed derived for it; of dropout, one for each rank."""
    seed = session.config.seed
    names = ("data", "numpy", "python", "sample")
    return {
        **{name: stream_seed(seed, name) for name in names},
        "dropout": [dropout_seed(seed, rank) for rank in range(session.group.size)],
        "init": {name: stream_seed(seed, f"init/{name}") for name in session.weights()},
    }


def _length(session: Session) -> str:
    tokens, stretch = session.budget.tokens_per_iteration, session.budget.stretch
    longer = "" if stretch == 1.0 else f" (budget x {stretch:g})"
    if session.budget.is_time:
        return f"{session.budget.seconds:,.0f} s x {tokens:,} tokens/it{longer}"
    return f"{session.budget.iterations:,} it x {tokens:,} tokens{longer}"
