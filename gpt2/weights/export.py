"""Export of finished runs to folders that transformers loads.

A model that transformers' GPT-2 supports becomes one. Any other model is exported with its own code,
copies of modules of this tree, for ``trust_remote_code``.
"""

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

from gpt2.attention.options import PartOptions
from gpt2.config import Config
from gpt2.data.tokenizer import (
    byte_spelling,
    end_of_text,
    provide_vocabulary,
    read_merges,
    vocabulary_strings,
)
from gpt2.mlp.options import ActivationOptions
from gpt2.model import GPT
from gpt2.model_config import ModelConfig
from gpt2.records.files import read_resolved_config
from gpt2.weights import modeling
from gpt2.weights.convert import merged_tensors, to_hf
from gpt2.weights.hf import (
    HEAD_NAME,
    PER_TOKEN,
    PREFIX,
    config_json,
    options_of,
    unsupported_components,
)
from gpt2.weights.model_code import flat_name, model_files
from gpt2.weights.source import CONFIG_FILE, WEIGHTS_FILE, require_recorded_weights
from lib.console import log
from lib.errors import ConfigError, Problem
from lib.files import fsync_directory, sha256_file, temporary_path, write_atomic, write_json
from lib.runs.record import RunRecord
from lib.runs.run_dir import RunDir

# Module of the exported code that transformers loads.
_MODELING = "modeling_kablate"
_END = "<|endoftext|>"
# Largest difference of fp64 logits from those of transformers, as a fraction of the largest logit.
_LOGITS_TOLERANCE = 1e-9
_COMPARED_TOKENS = 32


def export(run: RunDir, target: Path, build_dir: Path) -> None:
    """Export the finished ``run`` to the folder ``target``, atomically.

    It contains resolved_config.yaml, so that ``load_run`` and INIT_FROM load it too. Raises ConfigError
    if ``target`` has other content, PreflightError if the weights do not match their recorded digest,
    DataError if the vocabulary of the tokenizer is missing and cannot be downloaded.
    """
    trained = read_resolved_config(run, build_dir)
    # The weights are merged.
    config = replace(trained, model=replace(trained.model, adapters=()))
    require_recorded_weights(run)
    target = target.absolute()
    temporary = temporary_path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary.mkdir()
    try:
        weights, end = merged_tensors(run.path), end_of_text(config.data.tokenizer)
        if unsupported := unsupported_components(config.model):
            text = f"not supported by transformers' GPT-2: {', '.join(unsupported)}; "
            log("EXPORT", f"{text}adding the model's code, for trust_remote_code=True")
            settings, tensors = _own_model(_any_device(config.model), weights, end, temporary)
        else:
            settings = config_json(config.model, end)
            tensors = to_hf(weights, settings)
            _require_same_model(config.model, weights, settings, tensors)
        # transformers requires the format in the metadata of the file.
        content = safetensors.torch.save(tensors, metadata={"format": "pt"})
        write_atomic(temporary / WEIGHTS_FILE, content)
        write_json(temporary / CONFIG_FILE, settings)
        _write_tokenizer(config, temporary, build_dir)
        write_atomic(temporary / "README.md", _card(config, run, own_code=bool(unsupported)))
        write_atomic(temporary / run.resolved_config.name, run.resolved_config.read_bytes())
        for path in temporary.iterdir():
            path.chmod(0o644)
        _put(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@torch.no_grad()
def _require_same_model(
    model: ModelConfig,
    weights: Mapping[str, Tensor],
    hf_config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
) -> None:
    """Raise ConfigError unless transformers' GPT-2 of ``hf_config`` computes what the model does."""
    ours = GPT(model).eval().double()
    idx_BT = torch.arange(min(_COMPARED_TOKENS, model.shape.block_size))[None] * 7919
    try:
        ours.load_state_dict(weights)
        theirs = GPT2LMHeadModel(GPT2Config(**hf_config)).eval().double()
        missing, unexpected = theirs.load_state_dict(tensors, strict=False)
        found, expected = (each(idx_BT % model.shape.vocab_size) for each in (theirs, ours))
        tolerance = _LOGITS_TOLERANCE * float(expected.abs().max())
        same = missing == [HEAD_NAME] * (not model.untied_head) and not unexpected
        same = same and torch.allclose(found.logits, expected, rtol=0, atol=tolerance)
    # An activation that transformers lacks, and a shape that is not that of a GPT-2.
    except (KeyError, RuntimeError):
        same = False
    if not same:
        components = (ActivationOptions, PartOptions)
        parts = ", ".join(p.name for p in options_of(model) if isinstance(p, components))
        name = hf_config["activation_function"]
        what = (
            f"transformers' GPT-2 with {name} computes another function than this model of {parts}"
        )
        advice = (
            "correct hf_names of the activation, or unsupported_components in gpt2/weights/hf.py"
        )
        raise ConfigError(Problem(what, next=advice, code="export.other-model"))


def _own_model(
    model: ModelConfig, weights: dict[str, Tensor], end: int, folder: Path
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Write the code; return the options and the weights without the padding of the vocabulary."""
    for name, text in model_code(model).items():
        write_atomic(folder / name, text)
    for name in weights.keys() & {*PER_TOKEN}:
        weights[name] = weights[name][: model.shape.vocab_size].contiguous()
    settings = {
        "architectures": [modeling.KablateForCausalLM.__name__],
        "auto_map": {
            "AutoConfig": f"{_MODELING}.{modeling.KablateConfig.__name__}",
            "AutoModelForCausalLM": f"{_MODELING}.{modeling.KablateForCausalLM.__name__}",
        },
        "model_type": modeling.KablateConfig.model_type,
        "model": modeling.write_options(model),
        **modeling.summary(model),
        "bos_token_id": end,
        "eos_token_id": end,
        "pad_token_id": end,
        "dtype": "float32",
    }
    return settings, {PREFIX + name: tensor for name, tensor in weights.items()}


def model_code(model: ModelConfig) -> dict[str, str]:
    """Return name → text of the files with the code of ``model``."""
    classes = sorted({type(each) for each in options_of(model)}, key=lambda each: each.__name__)
    built = {type(module) for module in GPT(model).modules()}
    files = model_files([modeling.__name__, *(each.__module__ for each in classes)], built)
    text = files.pop(f"{flat_name(modeling.__name__)}.py")
    text += "\n\n# The classes in config.json.\n"
    for each in classes:
        text += f"from .{flat_name(each.__module__)} import {each.__name__}  # noqa: E402\n"
    names = "".join(f"    {each.__name__},\n" for each in classes)
    text += f"\nOPTION_CLASSES.update((each.__name__, each) for each in (\n{names}))\n"
    return files | {f"{_MODELING}.py": text}


def _any_device(model: ModelConfig) -> ModelConfig:
    """Return the model without padding, and without Triton kernels, which an export does not contain."""
    attention = replace(
        model.attention,
        backend=model.attention.backend and "auto",
        pattern=model.attention.pattern.for_any_device(),
    )
    if "triton" in replace(model, attention=attention).backends("gpu"):
        attention = replace(attention, backend="rows")
    return replace(
        model,
        shape=replace(model.shape, vocab_multiple=1),
        attention=attention,
        grad_checkpointing=False,
        loss_backend="torch",
    )


def _write_tokenizer(config: Config, folder: Path, build_dir: Path) -> None:
    """Write the files that AutoTokenizer needs to work offline."""
    settings: dict[str, Any] = {"model_max_length": config.model.shape.block_size}
    settings |= dict.fromkeys(("bos_token", "eos_token", "pad_token"), _END)
    settings["model_input_names"] = ["input_ids", "attention_mask"]
    if config.data.tokenizer == "byte":
        write_json(folder / "tokenizer.json", _byte_tokenizer())
        settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}
    else:
        data_dir = config.data.folder(build_dir)
        provide_vocabulary(config.data.tokenizer, data_dir)
        merges = read_merges(data_dir)
        vocabulary = vocabulary_strings(merges)
        write_json(folder / "vocab.json", {token: i for i, token in enumerate(vocabulary)})
        write_atomic(folder / "merges.txt", merges)
        settings |= {"tokenizer_class": "GPT2Tokenizer", "unk_token": _END}
    write_json(folder / "tokenizer_config.json", settings)


def _byte_tokenizer() -> dict[str, Any]:
    """Return tokenizer.json: byte-level BPE with the 256 bytes as its vocabulary, and no merges."""
    end = {"id": end_of_text("byte"), "content": _END, "special": True, "normalized": False}
    spaces = dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [end | spaces],
        "normalizer": None,
        "pre_tokenizer": level | {"use_regex": False},
        "post_processor": None,
        "decoder": level | {"use_regex": False},
        "model": {"type": "BPE", "vocab": byte_spelling(), "merges": []},
    }


def _card(config: Config, run: RunDir, *, own_code: bool) -> str:
    record = RunRecord(run)
    code, trust = record.code, ", trust_remote_code=True" if own_code else ""
    commit = f"{code.git_sha}{' with uncommitted changes' if code.dirty_tree else ''}"
    rows = {
        "run": run.path.name,
        "parameters": f"{config.model.num_params():,}",
        "context": f"{config.model.shape.block_size:,} tokens",
        "data": config.data.dataset,
        "tokenizer": config.data.tokenizer,
        "seed": config.seed,
        "iterations": f"{record.summary.value(int, 'final', 'iterations'):,}",
        "validation loss": f"{record.summary.value(float, 'final', 'val_loss'):.4f} nats per token",
        "initial weights": config.init.init_from or "random",
        "commit": commit,
        "SHA-256 of the trained weights": record.manifest.value(
            str, "artifacts", run.weights.name, "sha256"
        ),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return f"""---
library_name: transformers
pipeline_tag: text-generation
---

# {run.path.name}

A GPT-2 variant, trained by an ablation study of Kablate.

| | |
|---|---|
{table}

All settings are in {run.resolved_config.name}.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("FOLDER"{trust})
model = AutoModelForCausalLM.from_pretrained("FOLDER"{trust})
```
"""


def _put(temporary: Path, target: Path) -> None:
    """Rename ``temporary`` to ``target`` unless ``target`` has the same content already."""
    if target.is_dir() and _digests(target) == _digests(temporary):
        log("EXPORT", f"{target} is up to date")
        return
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        what, advice = "exists with different content", "remove it, or type: make export … OUT=DIR"
        raise ConfigError(Problem(what, str(target), advice, code="export.target-exists"))
    os.rename(temporary, target)
    fsync_directory(target.parent)
    log("EXPORT", f"wrote {len(_digests(target))} files to {target}")


def _digests(folder: Path) -> dict[str, str]:
    return {p.name: sha256_file(p) if p.is_file() else "a folder" for p in folder.iterdir()}
