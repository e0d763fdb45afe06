"""Rules across the parts of a configuration, each asked as far as its parts are there; no torch.

A problem begins with the name of the symbol that has to change, so that its line can be named.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from gpt2.attention.forms import choose_form
from gpt2.attention.grouped.options import GroupedOptions
from gpt2.attention.options import AttentionConfig
from gpt2.mlp.mlp_latent.options import MlpLatentOptions
from lib.binding import Value
from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.machine.options import MachineConfig
from lib.repro.options import ReproConfig

if TYPE_CHECKING:
    from gpt2.config import Config, ModelConfig

_OTHER_PROFILE = "or SET=RUN_PROFILE_MAXOUT_SPEED=y"


def broken_rules(
    values: Mapping[str, Value],
    attention: AttentionConfig | None,
    model: "ModelConfig | None",
    machine: MachineConfig | None,
    repro: ReproConfig | None,
) -> list[Problem]:
    """All that is wrong across parts. A part that is wrong by itself is None, and so is the model
    that it belongs to."""
    problems = [*_heads(values, attention)]
    # With heads of broken width nothing can be said of sizes.
    if model and not problems:
        problems += _sizes(model)
    if model and machine:
        problems += _forms(model, machine)
    if machine and repro:
        problems += _profile(repro, machine)
    if attention and repro:
        problems += _known_kernel(repro, attention)
    return problems


def refuse_lone_arms(configs: "Sequence[Config]") -> None:
    """ConfigError for a plan with runs that a strict profile takes as one arm of two only.

    torch.compile changes last bits, so the same run without it has to stand beside each.
    """
    compiled = {_eager(c): c for c in configs if c.machine.compile and c.repro.strict}
    if not compiled or compiled.keys() <= {_eager(c) for c in configs if not c.machine.compile}:
        return
    profile = next(iter(compiled.values())).repro.profile
    what = f"COMPILE: y under {profile}, and the same run without it is not planned"
    both = "or plan both: SET=COMPILE_EAGER_TWIN=y, or COMPILE=n,y among a matrix's or sweep's axes"
    raise ConfigError(Problem(what, next=f"type: SET=COMPILE=n, {_OTHER_PROFILE}, {both}"))


def wants_twins(configs: "Sequence[Config]") -> bool:
    """Whether the plan of ``configs`` has the eager twin of each beside it.

    Where some are compiled and some are not, that is a comparison already, and the plan's own.
    """
    return bool(configs) and all(c.machine.compile and c.study.eager_twin for c in configs)


def _eager(config: "Config") -> str:
    """The identity of the run without torch.compile."""
    machine = replace(config.machine, compile=False)
    return canonical_json(replace(config, machine=machine).identity())


def _profile(repro: ReproConfig, machine: MachineConfig) -> Iterator[Problem]:
    """What the profile does not take, or not without a reason."""
    under, precision, matmul = f"under {repro.profile}", machine.precision, machine.matmul_precision
    if repro.strict and not machine.repeats:
        what = f"DETERMINISTIC: off {under}, where every bit has to come out again"
        yield Problem(what, next=f"type: SET=DETERMINISTIC_STRICT=y, {_OTHER_PROFILE}")
    if repro.strict and precision == "fp16":
        what = f"PRECISION: fp16 {under}, which takes fp32, or bf16 with a reason"
        yield Problem(what, next=f"type: SET=PRECISION_FP32=y, {_OTHER_PROFILE}")
    elif repro.strict and precision != "fp32" and not repro.precision_why.strip():
        what = f"PRECISION: {precision} {under} needs a reason in PRECISION_WHY"
        advice = "type: SET='PRECISION_WHY=\"the reason\"', SET=PRECISION_FP32=y,"
        yield Problem(what, next=f"{advice} {_OTHER_PROFILE}")
    doubted = matmul != "highest" if repro.strict else matmul == "medium"
    if doubted and not repro.matmul_why.strip():
        what = f"MATMUL_PRECISION: {matmul} {under} needs a reason in MATMUL_WHY"
        advice = "type: SET='MATMUL_WHY=\"the reason\"', or SET=MATMUL_PRECISION_HIGHEST=y"
        yield Problem(what, next=advice)


def _known_kernel(repro: ReproConfig, attention: AttentionConfig) -> Iterator[Problem]:
    if repro.strict and attention.backend == "auto":
        what = f"ATTENTION_BACKEND: auto under {repro.profile}: the kernel has to be known"
        yield Problem(what, next=f"type: SET=ATTENTION_BACKEND_ROWS=y, {_OTHER_PROFILE}")


def _heads(values: Mapping[str, Value], attention: AttentionConfig | None) -> Iterator[Problem]:
    """Asked of the symbols, because something else may be wrong with the shape."""
    width, heads = int(values["N_EMBD"]), int(values["N_HEAD"])
    if width % heads:
        what = f"N_EMBD: {width} is not a multiple of N_HEAD={heads}"
        yield Problem(f"{what}; every head needs the same width")
    elif attention and attention.positions.rotates and width // heads % 2:
        what = (
            f"POSITIONS_ROPE: heads of {width // heads} numbers, N_EMBD={width} by N_HEAD={heads}"
        )
        advice = "type: SET=POSITIONS_LEARNED=y, or take another N_EMBD"
        yield Problem(f"{what}, have no pairs to rotate", next=advice)
    projection = attention.projection if attention else None
    if isinstance(projection, GroupedOptions) and heads % projection.n_kv_head:
        yield Problem(f"N_KV_HEAD: {projection.n_kv_head} does not divide N_HEAD={heads}")


def _forms(model: "ModelConfig", machine: MachineConfig) -> Iterator[Problem]:
    """That attention has a form of all its parts, in every block."""
    shows = {model.mlp.reads_weights(site) for site in model.sites()}
    for shown in sorted(shows):
        try:
            choose_form(model.attention, model.shape, shown, machine.device)
        except ConfigError as error:
            yield from error.problems


def _sizes(model: "ModelConfig") -> Iterator[Problem]:
    try:
        model.attention.pattern.check(model.shape)
    except ConfigError as error:
        yield from error.problems
    for site in model.sites():
        try:
            model.mlp.check_ratio(site)
            for mechanism in model.mlp.mechanisms:
                if isinstance(mechanism, MlpLatentOptions):
                    mechanism.check(model.mlp.size(site).hidden, site)
        except ConfigError as error:
            yield from error.problems
            break
