"""What a run says of itself at its start: one line for people, facts for the manifest."""

from typing import Any

import torch

from gpt2.attention.own import OwnAttention
from gpt2.attention.sdpa import torch_kernel
from gpt2.training.session import Session
from lib.machine.observe import GIB, hardware, knobs
from lib.repro.rng import POLICY, dropout_seed


def start_line(session: Session) -> str:
    """Device, memory, precision, kernels, threads, and what the configuration came to."""
    machine = session.config.machine
    found = hardware(session.device)
    on_gpu = session.device.type == "cuda"
    memory = found["vram_gib"] if on_gpu else found["ram_gib"]
    name = found["gpu_name"] if on_gpu else found["cpu_model"]
    habits = {
        "compiled": machine.compile,
        "deterministic": machine.deterministic,
        f"{machine.matmul_precision} fp32 products": machine.matmul_precision != "highest",
        "cudnn benchmark": machine.cudnn_benchmark,
    }
    parts = [
        session.config.repro.profile,
        f"{session.device} {name}, {memory:g} GiB",
        machine.precision,
        f"attention {attention_kernel(session)}",
        *([f"{session.group.size} processes"] if session.group.size > 1 else []),
        f"{torch.get_num_threads()} thread(s)",
        *(habit for habit, on in habits.items() if on),
        f"{sum(w.numel() for w in session.weights().values()):,} parameters",
        f"seed {session.config.seed}",
        _length(session),
    ]
    return " | ".join(parts)


def attention_kernel(session: Session) -> str:
    """How scores are computed: by rows, joined, as the pattern does, or by torch's kernel."""
    attention = session.model.h[0].attn
    if isinstance(attention.pattern, OwnAttention):
        return attention.pattern.kernel
    form = attention.form(session.device.type)
    if form == "rows":
        return "by rows"
    if form == "joined":
        return "joined, flex" if session.device.type == "cuda" else "joined, all pairs"
    precision = session.config.machine.precision
    return f"sdpa {torch_kernel(session.config.model, precision, session.device)}"


def manifest_facts(session: Session) -> dict[str, Any]:
    """What the manifest says beyond the machine: the run, its seeds, its data, its code."""
    config, train = session.config, session.config.train
    return {
        "run": {"name": session.run.path.name, "hash8": config.hash8},
        "origin": session.origin,
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
            "init_digests": session.init_digests,
        },
        "seeds": {
            "seed": config.seed,
            "dropout": [dropout_seed(config.seed, rank) for rank in range(session.group.size)],
            "policy": POLICY,
            "streams": [
                "init/PARAMETER",
                "data",
                "dropout",
                "dropout/RANK",
                "numpy",
                "python",
                "sample",
            ],
            "dataloader_seed_policy": "sequence g is addressed by (seed, data, g); workers draw nothing",
        },
        "data": session.dataset.manifest,
    }


def _length(session: Session) -> str:
    tokens, stretch = session.budget.tokens_per_iteration, session.budget.stretch
    longer = "" if stretch == 1.0 else f" (budget x {stretch:g})"
    if session.budget.is_time:
        return f"{session.budget.seconds:,.0f} s x {tokens:,} tokens/it{longer}"
    return f"{session.budget.iterations:,} it x {tokens:,} tokens{longer}"
