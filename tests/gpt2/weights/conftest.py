"""Random GPT-2 folders in transformers' format, and finished runs without training."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from gpt2.config import Config
from gpt2.lora import store_base
from gpt2.model import GPT
from gpt2.records.files import write_resolved_config
from gpt2.study.resolve import resolve_config
from gpt2.weights.convert import load_initial_weights
from lib.config.field import SymbolValue
from lib.config.layers import ConfigLayer
from lib.files import write_json
from lib.runs.run_dir import RunDir
from tests.gpt2.training.conftest import BASE, build_dir, train, tree
from tests.lib.fabricated import complete

__all__ = ["build_dir", "train", "tree"]

SIZE: dict[str, SymbolValue | None] = {"N_HEAD": 4, "N_EMBD": 32, "BLOCK_SIZE": 80}
SIZE |= {"DROPOUT": "0.0", "PRUNING_MAGNITUDE": None, "PRUNING_FREQUENCY": None}
THEIRS = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 80, "vocab_size": 257}


@pytest.fixture(scope="session")
def configure(tree) -> Callable[..., Config]:
    """Return a function that builds a small configuration; None removes a symbol."""

    def build(**changes: SymbolValue | None) -> Config:
        symbols = BASE | SIZE | changes
        symbols = {name: value for name, value in symbols.items() if value is not None}
        return resolve_config(tree, [ConfigLayer.of("test", "test", symbols)])

    return build


def export(run: RunDir, out: Path, build_dir: Path) -> None:
    """Export a run; import the exporter here, because transformers takes seconds."""
    from gpt2.weights.export import export as write_export

    write_export(run, out, build_dir)


def own_code(folder: Path, **settings: Any) -> Any:
    """Load an export with its own code; fail on missing or unused weights."""
    from transformers import AutoModelForCausalLM

    theirs, info = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **settings
    )
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    return theirs.eval()


@dataclass
class Exported:
    """A trained model, and its export as transformers loads it."""

    name: str
    ours: GPT
    theirs: Any
    folder: Path


# Models that together have every component of the registries, by what is special.
OWN_CODE: dict[str, dict[str, SymbolValue]] = {
    "everything": {
        "ATTENTION_PROJECTION_LATENT": True,
        "RECIPROCAL": True,
        "RECIPROCAL_WINDOW": 5,
        "RA_CROSS_TOKEN": True,
        "MLP_ATTN_GATE": True,
        "MLP_CROSS_TOKEN": True,
        "MLP_LATENT": True,
        "VALUE_RESIDUAL": True,
    },
    "sliding": {
        "ATTENTION_PATTERN_SLIDING": True,
        "SLIDING_WINDOW": 7,
        "POSITIONS_ROPE": True,
        "QK_NORM": True,
        "ATTENTION_SINK": True,
        "MLP_ATTN_GATE": True,
        "MLP_ATTN_GATE_POOLED": True,
        "BIAS": False,
        "NORM_RMSNORM": True,
        "ACTIVATION_SWIGLU": True,
    },
    "nsa": {
        "ATTENTION_PATTERN_NSA": True,
        "ATTENTION_PROJECTION_GROUPED": True,
        "N_KV_HEAD": 2,
        "NSA_COMPRESS_BLOCK": 8,
        "NSA_COMPRESS_STRIDE": 4,
        "NSA_SELECT_BLOCK": 8,
        "NSA_SELECT_COUNT": 3,
        "NSA_WINDOW": 9,
        "UNTIED_HEAD": True,
    },
}
LORA: dict[str, SymbolValue] = {
    "LORA": True,
    "LORA_RANK": 3,
    "LORA_DROPOUT": "0.3",
    "INIT_FROM": "run:base",
}
# Models with adapters.
ADAPTED = {
    f"adapted-{base}": {
        **LORA,
        f"LORA_BASE_{base.upper()}": True,
        "NORM_RMSNORM": True,
        "ATTENTION_SINK": True,
        "VALUE_RESIDUAL": True,
    }
    for base in ("fp32", "int8", "nf4")
}


@pytest.fixture(scope="package", params=OWN_CODE)
def exported(request, configure, tmp_path_factory) -> Exported:
    """Export a model that transformers lacks, with random weights."""
    folder = tmp_path_factory.mktemp(request.param)
    config = configure(**(OWN_CODE | ADAPTED)[request.param])
    export(write_finished(config, folder / "run"), folder / "out", folder)
    return Exported(request.param, native(config), own_code(folder / "out"), folder / "out")


def native(config: Config) -> GPT:
    """Build the model of ``write_finished`` without the code under test."""
    model = GPT(config.model)
    store_base(model, config.model.adapters)
    model.load_state_dict(random_weights(config))
    return model.eval()


def drawn(config: Config) -> GPT:
    """Build a randomly initialized model."""
    model = GPT(config.model)
    model.init_weights(3)
    return model.eval()


def loaded(config: Config, build_dir: Path) -> tuple[GPT, str, dict[str, str]]:
    """Build a model with the weights of INIT_FROM; return it, the log line and the digests."""
    model, lines = drawn(config), list[str]()

    def write(tag: str, text: str) -> None:
        lines.append(f"{tag} {text}")

    digests = load_initial_weights(model, config, build_dir, write)
    return model, lines[0], digests


def random_gpt2(**settings: Any) -> Any:
    """Build a GPT2LMHeadModel with large random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    ends = {"bos_token_id": 256, "eos_token_id": 256}
    theirs = GPT2LMHeadModel(GPT2Config(**(THEIRS | ends | settings)))
    generator = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(0, 0.2, generator=generator)
    return theirs.eval()


@pytest.fixture(scope="session")
def saved_gpt2(tmp_path_factory) -> Path:
    """Save a small transformers model with random weights."""
    path = tmp_path_factory.mktemp("gpt2")
    random_gpt2().save_pretrained(path)
    return path


@pytest.fixture
def folder(saved_gpt2, tmp_path) -> Path:
    """Return a copy of the saved transformers model."""
    return shutil.copytree(saved_gpt2, tmp_path / "theirs")


def write_finished(config: Config, path: Path) -> RunDir:
    """Write a finished run with random weights, half of one matrix pruned."""
    run = RunDir(path)
    run.path.mkdir()
    write_resolved_config(run, config)
    weights = random_weights(config)
    safetensors.torch.save_file(weights, run.weights)
    write_json(run.summary, {"final": {"val_loss": 2.5, "iterations": 10}})
    complete(run)
    return run


def random_weights(config: Config) -> dict[str, torch.Tensor]:
    """Return random weights; padding and pruned weights are zero, as after training."""
    generator = torch.Generator().manual_seed(5)
    model = GPT(config.model)
    weights = {name: p.detach() for name, p in model.named_parameters()}
    for tensor in weights.values():
        tensor.normal_(0, 0.2, generator=generator)
    # Otherwise greedy decoding repeats one token.
    if "wpe.weight" in weights:
        weights["wpe.weight"] *= 10
    for name in weights.keys() & {"wte.weight", "lm_head.weight"}:
        weights[name][config.model.shape.vocab_size :] = 0
    weights["h.0.attn.c_proj.weight"][::2] = 0
    store_base(model, config.model.adapters)
    return {name: p.detach() for name, p in model.named_parameters()}
