"""The weights of a transformers GPT-2 in a model of ours, whole or not at all."""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from gpt2.config import Config
from gpt2.model import GPT
from gpt2.weights import layout, source
from lib.errors import ConfigError, PreflightError, Problem
from lib.files import sha256

_MECHANISM = re.compile(r"\.(?:terms|gates|mechanisms)\.(\w+)\.")
_NAMED = 4


def initialise(
    model: GPT, config: Config, build_dir: Path, tell: Callable[[str, str], None]
) -> dict[str, str]:
    """Give ``model`` the weights of ``INIT_FROM``; nothing happens where that is empty.

    Parameters of mechanisms that GPT-2 does not have keep their values, and ``tell`` gets one line
    that names the mechanisms. Returns path → SHA-256 of the files that were read. ConfigError with
    everything that does not fit, PreflightError where the files are absent or damaged; the model is
    then as it was.
    """
    if not config.init.init_from:
        return {}
    place = source.folder(config, build_dir)
    if problems := source.mismatches(place, config.model):
        raise ConfigError(*problems)
    digests = {str(path.absolute()): sha256(path) for path in source.files(place)}
    kept = fill(model, read_tensors(place))
    names = sorted({_MECHANISM.findall(name)[0] for name in kept})
    own = f"; not in them, and as drawn: {len(kept)} tensors of {', '.join(names)}" if names else ""
    tell("INIT", f"{config.init.init_from}: every weight of {place}{own}")
    return digests


def read_tensors(place: Path) -> dict[str, Tensor]:
    """The weights of a folder under our names, in transformers' layout; ``lm_head`` may be there."""
    _, *weights = source.files(place)
    tensors: dict[str, Tensor] = {}
    for path in weights:
        for key, tensor in safetensors.torch.load_file(path).items():
            if name := layout.plain_name(key):
                tensors[name] = tensor
    return tensors


@torch.no_grad()
def fill(model: GPT, tensors: Mapping[str, Tensor]) -> list[str]:
    """Copy ``tensors`` (transformers' layout) into ``model``; the parameters that they lack.

    The padding of ``wte`` becomes zero. ConfigError when a bias other than zero has no place in a
    model without biases, PreflightError when the head is not tied; the model is then as it was.
    """
    own = dict(model.named_parameters())
    head = tensors.get(layout.HEAD)
    if head is not None and not torch.equal(head, tensors["wte.weight"]):
        raise PreflightError(
            Problem(f"{layout.HEAD} is not wte.weight; GPT-2's head is tied to it")
        )
    spare = sorted(tensors.keys() - own.keys() - {layout.HEAD})
    if biases := [name for name in spare if tensors[name].any()]:
        more = f" and {len(biases) - _NAMED} more" if len(biases) > _NAMED else ""
        what = f"BIAS=n, and theirs has biases: {', '.join(biases[:_NAMED])}{more}"
        raise ConfigError(Problem(what, next="set BIAS=y"))
    own["wte.weight"][model.config.shape.vocab_size :] = 0
    for name in own.keys() & tensors.keys():
        value = layout.relaid(name, tensors[name])
        own[name][: len(value)].copy_(value)
    return sorted(own.keys() - tensors.keys())


def to_hf(weights: Mapping[str, Tensor], theirs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights of ours as those of the GPT-2 that ``theirs`` describes; the tied head is left out.

    The padding of ``wte`` is cut off. Biases that a model lacks become zeros: the same function.
    """
    found = {name: layout.relaid(name, tensor) for name, tensor in weights.items()}
    found["wte.weight"] = found["wte.weight"][: theirs["vocab_size"]]
    for name, shape in layout.shapes(theirs).items():
        found.setdefault(name, found["wte.weight"].new_zeros(shape))
    return {layout.PREFIX + name: tensor.contiguous() for name, tensor in found.items()}
