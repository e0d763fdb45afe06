"""Preflight check: the configured attention can run on this machine."""

import importlib.util

import torch

from gpt2.attention.forms import choose_form
from gpt2.attention.sdpa import torch_kernel
from gpt2.config import ModelConfig
from lib.errors import PreflightError, Problem
from lib.machine.options import MachineConfig
from lib.machine.process import current_process


def check_attention(model: ModelConfig, machine: MachineConfig) -> None:
    """Check that the configured attention backend is available on this device.

    Raises PreflightError if it is not. If a kernel is named, torch is queried with tensors of the
    configured shape; no kernel runs.
    """
    shows_weights = {model.mlp.reads_weights(site) for site in model.sites()}
    forms = {choose_form(model.attention, model.shape, s, machine.device) for s in shows_weights}
    if "sdpa" in forms and model.attention.backend != "auto":
        index = current_process().local_rank if machine.device == "cuda" else None
        torch_kernel(
            model, machine.precision, torch.device(machine.device, index), model.shape.dropout
        )
    on_gpu = machine.device == "cuda"
    if "joined" in forms and on_gpu and importlib.util.find_spec("triton") is None:
        raise PreflightError(
            Problem(
                "the package triton is missing (required by FlexAttention on a GPU)",
                where=f"ATTENTION_BACKEND_{model.attention.backend.upper()}",
                next="type: SET=ATTENTION_BACKEND_ROWS=y",
                code="env.missing-package",
            )
        )
