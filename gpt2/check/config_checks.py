"""The built model matches its declaration and its symbols, and its training step fits."""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from gpt2.check.finding import CheckFinding, expect
from gpt2.check.subject import StepUnderTest
from gpt2.config import Config
from gpt2.memory.predict import estimate
from gpt2.mlp.options import PARAMS_TOLERANCE, RATIO_TOLERANCE
from gpt2.model import GPT
from lib.errors import RunError
from lib.optim.optimizers import trainable_parameters
from lib.units import GIB, first_of, format_size

# Widths are rounded.
_SHARE_TOLERANCE = 0.01


def check_declared(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Build the step at its full size on the meta device and check it."""
    config, model = subject.config, subject.full_model(subject.config)
    yield from _count(config, model)
    yield from _sizes_of_parts(config, model)
    yield from _flops(config, model)
    if subject.case.params and subject.parent:
        low, high = subject.case.params
        change = model.num_params() / subject.full_model(subject.parent).num_params() - 1
        expected = f"{low:+.1%} to {high:+.1%} parameters against {subject.case.parent}"
        found = f"{change:+.1%}: {model.num_params():,} built"
        yield from expect(low <= change <= high, "size-change", expected, found)
    yield from _delta(subject)
    yield from _built(model, config)


def _count(config: Config, model: GPT) -> Iterator[CheckFinding]:
    """Check that parameters are as many as declared, trainable and registered."""
    built, declared = model.num_params(), config.model.num_params()
    expected, found = f"{declared:,} parameters, as declared", f"{built:,} built"
    yield from expect(built == declared, "parameter-count", expected, found)
    target = config.model.mlp.target_params(config.model.shape)
    if config.model.mlp.sizing == "params":
        # Adapters come on top.
        adapters = sum(p.numel() for name, p in model.named_parameters() if ".adapter." in name)
        near = abs((built - adapters) / target - 1) <= PARAMS_TOLERANCE
        expected = f"{target:,} parameters within 1 %, as MODEL_PARAMS selects"
        yield from expect(near, "model-params", expected, found)
    # Beside adapters, everything is frozen.
    names = [name for name, _ in model.named_parameters()]
    trained = [name for name in names if ".adapter." in name or not config.model.adapters]
    wrong = sorted({*trained} ^ trainable_parameters(model).keys())
    expected = "every adapter is trained, and nothing else"
    expected = expected if config.model.adapters else "every parameter is trained"
    found = f"the other way round: {first_of(wrong)}"
    yield from expect(not wrong, "trainable-parameters", expected, found)
    # Tensors that require a gradient but are not registered as parameters.
    strays = [
        f"{path}.{name}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        for item in (value if isinstance(value, (list, tuple)) else [value])
        if isinstance(item, torch.Tensor) and item.requires_grad
    ]
    expected, found = "every trained tensor is a parameter", f"unregistered: {first_of(strays)}"
    yield from expect(not strays, "registered-parameters", expected, found)


def _sizes_of_parts(config: Config, model: GPT) -> Iterator[CheckFinding]:
    """Check the ratio of MLP to attention, and the share of each mechanism, in every block."""
    mlp = config.model.mlp
    sized = [mechanism.name for mechanism in mlp.mechanisms if mechanism.sized]
    for i, block in enumerate(model.blocks):
        if mlp.sizing == "ratio":
            ratio = matrix_elements(block.mlp) / matrix_elements(block.attn)
            declared = mlp.built_ratio(config.model.sites()[i])
            exact, what = math.isclose(ratio, declared, rel_tol=1e-9), f"of {declared:.6f}"
            found = f"{ratio:.6f} in block {i}"
            yield from expect(
                exact, "declared-ratio", f"MLP / attention {what}, as declared", found
            )
            near, found = abs(ratio / mlp.ratio - 1) <= RATIO_TOLERANCE, f"{ratio:.4f} in block {i}"
            yield from expect(
                near, "mlp-ratio", f"MLP / attention of {mlp.ratio} within 1 %", found
            )
        for name, part in block.mlp.mechanisms.items() if mlp.sizing != "hidden" else ():
            if name in sized:
                whole, size = matrix_elements(block.mlp), mlp.size(config.model.sites()[i])
                share = matrix_elements(part) / whole
                # Half a step of the mechanism's width, and of the hidden one, which it may pay for.
                dense = matrix_elements(block.mlp.c_fc) + matrix_elements(block.mlp.c_proj)
                rounding = 4 * dense / size.hidden + matrix_elements(part) / size.widths[name] / 2
                tolerance = _SHARE_TOLERANCE + rounding / whole
                near = abs(share - mlp.share / len(sized)) <= tolerance
                what = f"MLP_SHARE={mlp.share:g} of the MLP for {len(sized)} mechanisms"
                yield from expect(near, "mlp-share", what, f"{name} {share:.3f} in block {i}")


def _flops(config: Config, model: GPT) -> list[CheckFinding]:
    """Check that the declared FLOPs have two per weight of a matrix, and those of the scores.

    Native sparse attention applies some matrices once per block of tokens.
    """
    shape, attention = config.model.shape, config.model.attention
    pairs = 4 * shape.n_embd * attention.pattern.mean_keys(shape.block_size)
    for site, block in zip(config.model.sites(), model.blocks, strict=True):
        mlp, scores = config.model.mlp.cost(site).flops, attention.cost(shape, site.block).flops
        parts: dict[str, tuple[float, nn.Module, float]] = {"MLP": (mlp, block.mlp, 0.0)}
        if not attention.pattern.attends:
            parts["attention"] = (scores, block.attn, pairs)
        for name, (declared, module, others) in parts.items():
            least = 2 * matrix_elements(module) + others
            what = f"at least {least:,.0f} FLOPs per token of the {name}"
            found = f"{declared:,.0f} declared in block {site.block}"
            if findings := expect(declared >= least, "declared-flops", what, found):
                return findings
    return []


def _delta(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check that each symbol of the step is set in the configuration."""
    values = subject.config.values
    chosen = {f"{choice}_{value}".upper() for choice, value in values.items()}
    for name, value in subject.case.delta.items():
        if name in values:
            same, found = str(values[name]) == str(value), f"{name}={values[name]}"
        else:
            same, found = value is (name in chosen), "another member of the choice"
        yield from expect(same, "step-setting", f"{name}={value}", found)


def matrix_elements(module: nn.Module) -> int:
    """Return the number of weights in matrices, without adapters."""
    parameters = [p for name, p in module.named_parameters() if ".adapter." not in name]
    return sum(p.numel() for p in parameters if p.ndim >= 2)


def _ranks(model: GPT) -> set[int]:
    """Return the ranks of the adapters."""
    names = [name for name, _ in model.named_parameters() if name.endswith(".adapter.down.weight")]
    return {len(model.get_parameter(name)) for name in names}


def _built(model: GPT, config: Config) -> list[CheckFinding]:
    """Check sizes of the model at full size against the symbols, or their rule if they are 0."""
    block, values = model.blocks[0], config.values
    n_embd, multiple = int(values["N_EMBD"]), int(values["VOCAB_MULTIPLE"])
    dropouts = {n: m.p for n, m in model.named_modules() if isinstance(m, nn.Dropout)}
    of_adapters = {p for name, p in dropouts.items() if ".adapter." in name}
    rates = {p for name, p in dropouts.items() if ".adapter." not in name} | {block.attn.dropout}
    built: dict[str, tuple[Any, Any]] = {
        "N_LAYER": (len(model.blocks), values["N_LAYER"]),
        "N_EMBD": (model.wte.embedding_dim, n_embd),
        "BIAS": (block.attn.c_proj.bias is not None, values["BIAS"]),
        "DROPOUT": (rates, {float(values["DROPOUT"])}),
    }
    if of_adapters:
        built["LORA_DROPOUT"] = of_adapters, {float(values["LORA_DROPOUT"])}
        built["LORA_RANK"] = _ranks(model), {values["LORA_RANK"]}
        names = dict(block.named_parameters())
        layers = {"ATTENTION_IN": "attn.c_attn", "ATTENTION_OUT": "attn.c_proj"}
        for name, layer in (layers | {"MLP_IN": "mlp.c_fc", "MLP_OUT": "mlp.c_proj"}).items():
            adapted = f"{layer}.adapter.up.weight" in names
            built[f"LORA_{name}"] = adapted, values[f"LORA_{name}"]
    rows = math.ceil(config.model.shape.vocab_size / multiple) * multiple
    built["VOCAB_MULTIPLE"] = {model.wte.num_embeddings, len(model.head)}, {rows}
    built["UNTIED_HEAD"] = model.head is not model.wte.weight, values["UNTIED_HEAD"]
    if model.wpe is not None:
        built["BLOCK_SIZE"] = model.wpe.num_embeddings, values["BLOCK_SIZE"]
    if values["ATTENTION_BACKEND"] == "rows" and block.attn.backend != "own":
        built["ATTENTION_BACKEND"] = block.attn.backend, "rows"
    if "reciprocal" in block.attn.terms:
        term = vars(block.attn.terms["reciprocal"])
        built["RECIPROCAL_WINDOW"] = term["reach"], values["RECIPROCAL_WINDOW"]
        if term["constant"] is not None:
            built["RECIPROCAL_ALPHA"] = term["constant"], float(values["RECIPROCAL_ALPHA"])
    if values["ATTENTION_PATTERN"] == "sliding":
        pattern: Any = block.attn.pattern
        # The widest row of a sequence that is longer than any window.
        built["SLIDING_WINDOW"] = pattern.longest_row(2**30), values["SLIDING_WINDOW"]
    if values["ATTENTION_PROJECTION"] == "latent":
        latent = block.attn.c_attn.get_submodule("c_k").get_parameter("weight").shape[0]
        derived = max(8, 8 * math.floor(n_embd / 6 / 8 + 0.5))
        built["LATENT_DIM"] = latent, values["LATENT_DIM"] or derived
    if values["MLP_SIZING"] == "hidden":
        built["MLP_HIDDEN"] = block.mlp.c_proj.in_features, values["MLP_HIDDEN"] or 4 * n_embd
    return [
        CheckFinding("built-size", f"{name}={values[name]}: {expected} in the model", f"{actual}")
        for name, (actual, expected) in built.items()
        if actual != expected
    ][:2]


# A training step at the configured size runs and fits the memory of its target.
#
# Fake tensors predict the step on any machine; the prediction is recorded with the findings.


def check_full_size(subject: StepUnderTest) -> list[CheckFinding]:
    """Check dimensions, types and peak memory of a training step as configured."""
    config, target = subject.config, subject.context.target(subject.config.machine.device)
    try:
        needs = estimate(config, target)
    except RunError as error:
        return [CheckFinding("training-step", "a training step at the configured size", str(error))]
    name = target if isinstance(target, str) else target.name
    subject.facts["full_size"] = {
        "target": name,
        "parameters": needs.parameters,
        "flops_per_token": needs.flops_per_token,
        "peak_bytes": dict(needs.peak_bytes),
        "stage": needs.stage,
        "cpu_peak_bytes": needs.cpu_peak_bytes,
        "memory_gib": needs.memory_gib,
        "largest_micro_batch": needs.largest_micro_batch,
        "row": needs.row(),
    }
    if needs.fits:
        return []
    largest, memory = needs.largest_micro_batch, format_size(needs.memory_gib * GIB)
    text = f"peak memory of tensors {format_size(needs.total_bytes)} of {memory}"
    if largest:
        steps = config.train.global_batch // (largest * config.train.gpus)
        text += f"; SET='BATCH_SIZE={largest} GRAD_ACCUMULATION={steps}' fits"
    else:
        text += "; a single sequence does not fit either"
    return [CheckFinding("fits-memory", f"BATCH_SIZE={config.train.batch_size} fits {name}", text)]
