"""GPT-2 as transformers spells it: names, shapes and settings beside ours; imports no torch.

Our parameters have transformers' names without ``transformer.``. Its linear layers are Conv1D, whose
matrices are [in, out] where ours are [out, in]; its ``wte`` has no padded rows.
"""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from gpt2.config import ModelConfig

if TYPE_CHECKING:
    from torch import Tensor

PREFIX = "transformer."
HEAD = "lm_head.weight"
ACTIVATIONS = {"gelu_tanh": "gelu_new", "gelu_exact": "gelu"}
# gelu_new and gelu_pytorch_tanh are the same function, written out and as torch's kernel.
_THEIR_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}
_THEIR_ACTIVATIONS |= {"gelu": "gelu_exact"}
_TRANSPOSED = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
# The causal mask, which older files carry along.
_MASK = re.compile(r"h\.\d+\.attn\.(masked_)?bias")
# What a key means that config.json leaves out, by transformers' GPT2Config.
_DEFAULTS: dict[str, Any] = {
    "vocab_size": 50257,
    "n_positions": 1024,
    "n_embd": 768,
    "n_layer": 12,
    "n_head": 12,
    "n_inner": None,
    "activation_function": "gelu_new",
}
# Variants of GPT-2 that we do not build, off.
_FIXED: dict[str, Any] = {
    "model_type": "gpt2",
    "layer_norm_epsilon": 1e-5,
    "scale_attn_weights": True,
    "scale_attn_by_inverse_layer_idx": False,
    "add_cross_attention": False,
    "tie_word_embeddings": True,
}


def relaid(name: str, tensor: "Tensor") -> "Tensor":
    """transformers' tensor of our parameter ``name`` in our layout, or the reverse; a view."""
    return tensor.T if name.endswith(_TRANSPOSED) else tensor


def plain_name(name: str) -> str | None:
    """A file's tensor as our parameter is called; None for what is no weight."""
    name = name.removeprefix(PREFIX)
    return None if _MASK.fullmatch(name) else name


def with_defaults(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """config.json with every key that we look at."""
    found = {**_DEFAULTS, **_FIXED, **theirs}
    found["n_inner"] = found["n_inner"] or 4 * found["n_embd"]
    return found


def shapes(theirs: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every weight of the GPT-2 that ``theirs`` describes, in transformers' layout."""
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
    return embeddings | blocks | {"ln_f.weight": (width,), "ln_f.bias": (width,)}


def differences(model: ModelConfig, theirs: Mapping[str, Any]) -> list[str]:
    """Every way in which the weights that ``theirs`` describes do not fit ``model``."""
    shape = model.shape
    found = [
        f"{name}={ours}, and theirs has {key}={theirs[key]}"
        for name, ours, key in (
            ("N_LAYER", shape.n_layer, "n_layer"),
            ("N_HEAD", shape.n_head, "n_head"),
            ("N_EMBD", shape.n_embd, "n_embd"),
            ("BLOCK_SIZE", shape.block_size, "n_positions"),
        )
        if ours != theirs[key]
    ]
    if shape.vocab_size != theirs["vocab_size"]:
        has = f"TOKENIZER has {shape.vocab_size} tokens"
        found.append(f"{has}, and theirs has vocab_size={theirs['vocab_size']}")
    if model.attention.projection.name != "dense":
        found.append(f"ATTENTION_PROJECTION={model.attention.projection.name}, and theirs is dense")
    if model.attention.positions.rotates:
        learned = "theirs are learned: set POSITIONS_LEARNED=y"
        found.append(f"POSITIONS={model.attention.positions.name}, and {learned}")
    hidden = sorted({model.mlp.size(site).hidden for site in model.sites()})
    if hidden != [theirs["n_inner"]]:
        units = "/".join(map(str, hidden))
        found.append(
            f"the MLP has {units} hidden units, and theirs has n_inner={theirs['n_inner']}"
        )
    if shape.activation != _THEIR_ACTIVATIONS.get(theirs["activation_function"]):
        its = theirs["activation_function"]
        found.append(f"ACTIVATION={shape.activation}, and theirs has activation_function={its}")
    for key, ours in _FIXED.items():
        if theirs[key] != ours:
            found.append(f"a GPT-2 here has {key}={ours}, and theirs has {theirs[key]}")
    return found


def without_form(model: ModelConfig) -> list[str]:
    """The parts of ``model`` that transformers' GPT-2 does not have."""
    attention = model.attention
    plain = {"dense", "full", "learned"}
    parts = (attention.projection, attention.pattern, attention.positions)
    kinds = [part.name for part in parts if part.name not in plain]
    added = (*attention.terms, *attention.gates, *model.mlp.mechanisms)
    return kinds + [part.name for part in added]


def config_json(model: ModelConfig, end_of_text: int) -> dict[str, Any]:
    """What transformers' config.json says of a model without parts that have no form there."""
    shape = model.shape
    dropout = {f"{where}_pdrop": shape.dropout for where in ("embd", "attn", "resid")}
    return (
        _FIXED
        | dropout
        | {
            "architectures": ["GPT2LMHeadModel"],
            "vocab_size": shape.vocab_size,
            "n_positions": shape.block_size,
            "n_embd": shape.n_embd,
            "n_layer": shape.n_layer,
            "n_head": shape.n_head,
            "n_inner": model.mlp.size(model.sites()[0]).hidden,
            "activation_function": ACTIVATIONS[shape.activation],
            "bos_token_id": end_of_text,
            "eos_token_id": end_of_text,
            "dtype": "float32",
        }
    )
