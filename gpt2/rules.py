"""Rules across the sections of a configuration. Does not import torch.

A rule is checked only if the sections it depends on are valid. The text of each problem begins with
the symbol to change (``SYMBOL: …``), so that the problem can be located at the symbol's line.
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
    """Return the problems of all rules across sections.

    A section that is itself invalid is None; ``model`` is None if one of its sections is invalid.
    """
    problems = [*_head_problems(values, attention)]
    # The size rules assume a valid head width.
    if model and not problems:
        problems += _size_problems(model)
    if model and machine:
        problems += _backend_problems(model, machine)
    if machine and repro:
        problems += _profile_problems(repro, machine)
    if attention and repro:
        problems += _kernel_problems(repro, attention)
    return problems


def refuse_lone_arms(configs: "Sequence[Config]") -> None:
    """Require a paired eager run for each compiled run under a strict profile.

    torch.compile changes last bits, so strict profiles require the same run without it in the plan.
    Raises ConfigError if a compiled run is not paired.
    """
    compiled = {_eager(c): c for c in configs if c.machine.compile and c.repro.strict}
    if not compiled or compiled.keys() <= {_eager(c) for c in configs if not c.machine.compile}:
        return
    profile = next(iter(compiled.values())).repro.profile
    what = f"COMPILE: y under {profile} requires the same run with COMPILE=n in the plan"
    both = "or plan both: SET=COMPILE_EAGER_TWIN=y, or COMPILE=n,y among a matrix's or sweep's axes"
    advice = f"type: SET=COMPILE=n, {_OTHER_PROFILE}, {both}"
    raise ConfigError(Problem(what, next=advice, code="config.unpaired-compile"))


def wants_twins(configs: "Sequence[Config]") -> bool:
    """Return whether a paired eager run is added for each of ``configs``.

    A plan with compiled and eager runs already is a comparison, so no runs are added.
    """
    return bool(configs) and all(c.machine.compile and c.study.eager_twin for c in configs)


def _eager(config: "Config") -> str:
    """Return the identity of the run without torch.compile."""
    machine = replace(config.machine, compile=False)
    return canonical_json(replace(config, machine=machine).identity())


def _profile_problems(repro: ReproConfig, machine: MachineConfig) -> Iterator[Problem]:
    """Yield settings that the profile forbids, or allows only with a written reason."""
    under, precision, matmul = f"under {repro.profile}", machine.precision, machine.matmul_precision
    if repro.strict and not machine.repeats:
        what = f"DETERMINISTIC: off {under} (expected DETERMINISTIC_STRICT=y)"
        advice = f"type: SET=DETERMINISTIC_STRICT=y, {_OTHER_PROFILE}"
        yield Problem(what, next=advice, code="config.profile-conflict")
    if repro.strict and precision == "fp16":
        what = f"PRECISION: fp16 {under} (expected fp32, or bf16 with PRECISION_WHY)"
        advice = f"type: SET=PRECISION_FP32=y, {_OTHER_PROFILE}"
        yield Problem(what, next=advice, code="config.profile-conflict")
    elif repro.strict and precision != "fp32" and not repro.precision_why.strip():
        what = f"PRECISION: {precision} {under} requires a reason in PRECISION_WHY"
        advice = "type: SET='PRECISION_WHY=\"the reason\"', SET=PRECISION_FP32=y,"
        yield Problem(what, next=f"{advice} {_OTHER_PROFILE}", code="config.missing-reason")
    needs_reason = matmul != "highest" if repro.strict else matmul == "medium"
    if needs_reason and not repro.matmul_why.strip():
        what = f"MATMUL_PRECISION: {matmul} {under} requires a reason in MATMUL_WHY"
        advice = "type: SET='MATMUL_WHY=\"the reason\"', or SET=MATMUL_PRECISION_HIGHEST=y"
        yield Problem(what, next=advice, code="config.missing-reason")


def _kernel_problems(repro: ReproConfig, attention: AttentionConfig) -> Iterator[Problem]:
    if repro.strict and attention.backend == "auto":
        what = f"ATTENTION_BACKEND: auto under {repro.profile} (expected an explicit backend)"
        advice = f"type: SET=ATTENTION_BACKEND_ROWS=y, {_OTHER_PROFILE}"
        yield Problem(what, next=advice, code="config.profile-conflict")


def _head_problems(
    values: Mapping[str, Value], attention: AttentionConfig | None
) -> Iterator[Problem]:
    """Check the head width from the symbols, because the shape may be invalid otherwise."""
    width, heads = int(values["N_EMBD"]), int(values["N_HEAD"])
    if width % heads:
        what = f"N_EMBD: expected a multiple of N_HEAD={heads}, got {width}"
        yield Problem(what, code="config.not-divisible")
    elif attention and attention.positions.rotates and width // heads % 2:
        what = (
            f"POSITIONS_ROPE: head width must be even, got {width // heads} "
            f"(N_EMBD={width}, N_HEAD={heads})"
        )
        advice = "type: SET=POSITIONS_LEARNED=y, or choose another N_EMBD"
        yield Problem(what, next=advice, code="config.not-divisible")
    projection = attention.projection if attention else None
    if isinstance(projection, GroupedOptions) and heads % projection.n_kv_head:
        what = f"N_KV_HEAD: expected a divisor of N_HEAD={heads}, got {projection.n_kv_head}"
        yield Problem(what, code="config.not-divisible")


def _backend_problems(model: "ModelConfig", machine: MachineConfig) -> Iterator[Problem]:
    """Yield a problem if no attention backend supports every component, in any block."""
    reads_weights = {model.mlp.reads_weights(site) for site in model.sites()}
    for weights_needed in sorted(reads_weights):
        try:
            choose_form(model.attention, model.shape, weights_needed, machine.device)
        except ConfigError as error:
            yield from error.problems


def _size_problems(model: "ModelConfig") -> Iterator[Problem]:
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
