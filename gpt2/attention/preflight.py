"""Whether the attention that is configured can run on this machine."""

import importlib.util

import torch

from gpt2.attention.forms import choose_form
from gpt2.attention.sdpa import torch_kernel
from gpt2.config import ModelConfig
from lib.errors import PreflightError, Problem
from lib.machine.options import MachineConfig
from lib.machine.process import current_process


def check_attention(model: ModelConfig, machine: MachineConfig) -> None:
    """Refuse a backend that has no kernel for this device.

    PreflightError. Of a kernel that is named torch is asked, with tensors of the shape; none runs.
    """
    shows = {model.mlp.reads_weights(site) for site in model.sites()}
    forms = {choose_form(model.attention, model.shape, s, machine.device) for s in shows}
    if "sdpa" in forms and model.attention.backend != "auto":
        index = current_process().local_rank if machine.device == "cuda" else None
        torch_kernel(
            model, machine.precision, torch.device(machine.device, index), model.shape.dropout
        )
    on_gpu = machine.device == "cuda"
    if "joined" in forms and on_gpu and importlib.util.find_spec("triton") is None:
        raise PreflightError(
            Problem(
                "joined attention on a GPU is FlexAttention, and the package triton is missing",
                where=f"ATTENTION_BACKEND_{model.attention.backend.upper()}",
                next="type: SET=ATTENTION_BACKEND_ROWS=y",
            )
        )
