"""Names, shapes and settings of transformers' GPT-2 mapped to native ones; imports no torch.

Native parameters have transformers' names without ``transformer.``. transformers' linear layers are
Conv1D with matrices [in, out] instead of [out, in], and ``wte`` has no padding rows.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import TYPE_CHECKING, Any

from gpt2.attention.config import AttentionConfig
from gpt2.attention.options import DenseOptions, FullOptions, LearnedOptions
from gpt2.mlp.options import ActivationOptions, MlpConfig
from gpt2.model_config import LayernormOptions, ModelConfig
from gpt2.shape import ModelShape

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "transformer."
# Without the prefix in transformers. Not in the weights of a model with a tied head.
HEAD_NAME = "lm_head.weight"
# Parameters with a row for each token, which are padded.
PER_TOKEN = ("wte.weight", HEAD_NAME)
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# The causal mask, stored in older files.
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
# Options classes of GPT-2, beside those of activations.
_GPT2 = {ModelConfig, ModelShape, AttentionConfig, MlpConfig}
_GPT2 |= {DenseOptions, FullOptions, LearnedOptions, LayernormOptions}
# Defaults of transformers' GPT2Config for keys missing in config.json.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
    "tie_word_embeddings": True,
}
# Settings of unsupported GPT-2 variants, at the only supported value.
FIXED: dict[str, Any] = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
}


def convert_layout(name: str, tensor: "Tensor") -> "Tensor":
    """Convert the tensor of parameter ``name`` between the two layouts; returns a view."""
    return tensor.T if name.endswith(_TRANSPOSED) else tensor


def native_name(name: str) -> str | None:
    """Return the native name of a tensor in a file; None if it is not a weight."""
    name = name.removeprefix(PREFIX)
    return None if _MASK.fullmatch(name) else name


def their_name(name: str) -> str:
    """Return the name of a parameter in transformers."""
    return name if name == HEAD_NAME else PREFIX + name


def with_defaults(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """Return config.json with defaults for every key that is read."""
    settings = {**_DEFAULTS, **FIXED, **theirs}
    settings["n_inner"] = settings["n_inner"] or 4 * settings["n_embd"]
    return settings


def shapes(theirs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of every weight described by ``theirs``, in transformers' layout."""
    width, inner = theirs["n_embd"], theirs["n_inner"]
    norms = {f"{norm}.{part}": (width,) for norm in ("ln_1", "ln_2") for part in ("weight", "bias")}
    block = norms | {
        "attn.c_attn.weight": (width, 3 * width),
        "attn.c_attn.bias": (3 * width,),
        "attn.c_proj.weight": (width, width),
        "attn.c_proj.bias": (width,),
        "mlp.c_fc.weight": (width, inner),
        "mlp.c_fc.bias": (inner,),
        "mlp.c_proj.weight": (inner, width),
        "mlp.c_proj.bias": (width,),
    }
    blocks = {f"h.{i}.{n}": shape for i in range(theirs["n_layer"]) for n, shape in block.items()}
    embeddings = {
        "wte.weight": (theirs["vocab_size"], width),
        "wpe.weight": (theirs["n_positions"], width),
    }
    last: dict[str, tuple[int, ...]] = {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    if not theirs["tie_word_embeddings"]:
        last[HEAD_NAME] = embeddings["wte.weight"]
    return embeddings | blocks | last


def options_of(value: Any) -> Iterator[Any]:
    """Yield the options object ``value`` and all that it contains."""
    if is_dataclass(value):
        yield value
    for item in value if isinstance(value, tuple) else vars(value).values():
        if isinstance(item, tuple) or is_dataclass(item):
            yield from options_of(item)


def unsupported_components(model: ModelConfig) -> list[str]:
    """Return the components that transformers' GPT-2 lacks: all options classes but those listed here."""
    return [
        part.name
        for part in options_of(model)
        if type(part) not in _GPT2 and not (isinstance(part, ActivationOptions) and part.hf_names)
    ]


def config_json(model: ModelConfig, end_of_text: int) -> dict[str, Any]:
    """Return transformers' config.json for a model that transformers supports."""
    shape = model.shape
    dropout = {f"{place}_pdrop": shape.dropout for place in ("embd", "attn", "resid")}
    return (
        FIXED
        | dropout
        | {
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": shape.vocab_size,
            "n_positions": shape.block_size,
            "n_embd": shape.n_embd,
            "n_layer": shape.n_layer,
            "n_head": shape.n_head,
            "n_inner": model.mlp.size(model.sites()[0]).hidden,
            "activation_function": model.mlp.activation.hf_names[0],
            "tie_word_embeddings": not model.untied_head,
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            "dtype": "float32",
        }
    )
