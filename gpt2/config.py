"""The typed, frozen configuration of a run.

Every run is built from symbol values by ``Config.from_values``. The steps of a study use the same
path, so ranges, dependencies and rules apply to them too.
"""

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, get_type_hints

from gpt2.attention.config import AttentionConfig
from gpt2.attention.options import GroupedOptions
from gpt2.data.options import TOKENIZER_VOCAB, DataOptions
from gpt2.mlp.options import MlpConfig
from gpt2.model_config import ModelConfig
from gpt2.shape import ModelShape
from gpt2.weights.options import ADAPTERS, InitialWeightsOptions
from lib.config.field import SymbolValue, from_symbols, kconfig_field
from lib.env.gpu import usable_cores
from lib.env.options import EnvironmentConfig, MachineConfig, NumericsOptions
from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.optim.options import OPTIMIZERS, OptimizerOptions
from lib.optim.schedule import ScheduleOptions
from lib.pruning.options import PRUNERS, NoneOptions
from lib.report.options import VerdictOptions
from lib.runner.slurm import SlurmOptions
from lib.tracking.options import TelemetryOptions, TrackingConfig

# Rules across the sections of a configuration. Does not import torch.
#
# A rule is checked only if the sections it depends on are valid. The text of each problem begins with
# the symbol to change (``SYMBOL: …``), so that the problem can be located at the symbol's line.


_OTHER_PROFILE = "or SET=RUN_PROFILE_MAXOUT_SPEED=y"


@dataclass(frozen=True)
class ReproConfig:
    """Profile of a run, and the rules of the profile."""

    # paper_repro or maxout_speed
    profile: str = kconfig_field("RUN_PROFILE")
    # Reasons for settings that a paper must justify; "" if none.
    precision_why: str = kconfig_field("PRECISION_WHY", identity=False)
    matmul_why: str = kconfig_field("MATMUL_WHY", identity=False)
    # Minimum number of seeds of a final result.
    finalist_min_seeds: int = kconfig_field("FINALIST_MIN_SEEDS", identity=False)

    @property
    def strict(self) -> bool:
        """Return whether results must be bitwise reproducible (profile paper_repro)."""
        return self.profile == "paper_repro"


def broken_rules(
    values: Mapping[str, SymbolValue],
    attention: AttentionConfig | None,
    model: ModelConfig | None,
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
        try:
            # Every component, in any block.
            model.backends("cpu")
        except ConfigError as error:
            problems += error.problems
    if machine:
        problems += _sharding_problems(machine, int(values["GPUS"]))
    if model and machine:
        problems += _adapter_problems(model, machine)
    if machine and repro:
        problems += _profile_problems(repro, machine)
    if attention and repro and repro.strict and attention.backend == "auto":
        what = f"ATTENTION_BACKEND: auto under {repro.profile} (expected an explicit backend)"
        advice = f"type: SET=ATTENTION_BACKEND_ROWS=y, {_OTHER_PROFILE}"
        problems.append(Problem(what, next=advice, code="config.profile-conflict"))
    return problems


def refuse_unpaired_compile(configs: "Sequence[Config]") -> None:
    """Require the same run without torch.compile for each compiled run under a strict profile.

    torch.compile changes last bits. Raises ConfigError if a compiled run is not paired.
    """
    compiled = {_eager(c): c for c in configs if c.machine.compile and c.repro.strict}
    if not compiled or compiled.keys() <= {_eager(c) for c in configs if not c.machine.compile}:
        return
    profile = next(iter(compiled.values())).repro.profile
    what = f"COMPILE: y under {profile} requires the same run with COMPILE=n in the plan"
    advice = f'type: SET=COMPILE=n, {_OTHER_PROFILE}, or train both: SWEEP="COMPILE=n,y"'
    raise ConfigError(Problem(what, next=advice, code="config.unpaired-compile"))


def refuse_adapters_without_base(configs: "Sequence[Config]") -> None:
    """Require initial weights for adapters. Raises ConfigError.

    Not a rule of every configuration, since checks train a small form from random weights.
    """
    if any(config.model.adapters and not config.init.init_from for config in configs):
        what = "LORA: y without initial weights (expected INIT_FROM of a trained model)"
        advice = "type: SET=INIT_FROM=run:NAME, or hf:PATH; make ls lists the runs"
        raise ConfigError(Problem(what, next=advice, code="config.no-base"))


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


def _sharding_problems(machine: MachineConfig, gpus: int) -> Iterator[Problem]:
    """Yield settings under which weights cannot be sharded.

    No dependencies in Kconfig, which would turn sharding off without an error.
    """
    if machine.data_parallel != "fsdp":
        return
    if gpus == 1:
        what = "DATA_PARALLEL_FSDP: y with GPUS=1 (expected GPUS of at least 2, or DDP)"
        yield Problem(what, next="type: SET=DATA_PARALLEL_DDP=y", code="config.conflict")
    if machine.compile:
        what = "COMPILE: y with DATA_PARALLEL_FSDP=y (expected n)"
        yield Problem(what, next="type: SET=COMPILE=n", code="config.conflict")
    if machine.precision == "fp16":
        what = "PRECISION: fp16 with DATA_PARALLEL_FSDP=y (expected bf16 or fp32)"
        yield Problem(what, next="type: SET=PRECISION_BF16=y", code="config.conflict")


def _adapter_problems(model: ModelConfig, machine: MachineConfig) -> Iterator[Problem]:
    """Yield settings under which the adapters of a model cannot be trained."""
    for options in model.adapters:
        width = model.shape.n_embd
        if options.rank > width:
            what = f"LORA_RANK: expected at most N_EMBD={width}, got {options.rank}"
            yield Problem(what, next=f"type: SET=LORA_RANK={width}", code="config.out-of-range")
        if machine.data_parallel == "fsdp":
            what = "DATA_PARALLEL_FSDP: y with LORA=y (expected DDP)"
            yield Problem(what, next="type: SET=DATA_PARALLEL_DDP=y", code="config.conflict")
        if machine.compile and options.base != "fp32":
            what = f"COMPILE: y with LORA_BASE={options.base} (expected n)"
            yield Problem(what, next="type: SET=COMPILE=n", code="config.conflict")


def _head_problems(
    values: Mapping[str, SymbolValue], attention: AttentionConfig | None
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


def _size_problems(model: ModelConfig) -> Iterator[Problem]:
    try:
        model.attention.pattern.check(model.shape)
    except ConfigError as error:
        yield from error.problems
    try:
        model.mlp.check_params(model.shape, model.base_params())
    except ConfigError as error:
        yield from error.problems
        return
    for site in model.sites():
        try:
            model.mlp.check_ratio(site)
            for mechanism in model.mlp.mechanisms:
                mechanism.check(model.mlp.size(site).hidden, site)
        except ConfigError as error:
            yield from error.problems
            break


# Paths, in the identity, of the settings that divide a step's sequences among processes, their
# threads and micro-batches. A checkpoint fits any division.
DIVISION = frozenset(
    {
        *("train.gpus", "train.batch_size", "train.grad_accumulation"),
        *("machine.data_parallel", "machine.cpu_threads"),
    }
)


@dataclass(frozen=True)
class TrainConfig:
    """Options of the training loop: budget, batch size and intervals."""

    # iterations, tokens, flops or time
    budget: str = kconfig_field("BUDGET")
    max_iters: int = kconfig_field("MAX_ITERS")
    max_tokens: int = kconfig_field("MAX_TOKENS")
    max_flops: float = kconfig_field("MAX_FLOPS", low=1.0, high=1e30)
    max_time_seconds: int = kconfig_field("GPT2_MAX_TIME")
    # Sequences per optimizer step, all processes together.
    global_batch: int = kconfig_field("GLOBAL_BATCH")
    # Sequences per forward pass of one process; 0 for the largest that fits, before it is planned.
    batch_size: int = kconfig_field("BATCH_SIZE")
    grad_accumulation: int = kconfig_field("GRAD_ACCUMULATION")
    gpus: int = kconfig_field("GPUS")
    log_interval: int = kconfig_field("LOG_INTERVAL", identity=False)
    first_steps: int = kconfig_field("FIRST_STEPS", identity=False)
    eval_interval: int = kconfig_field("EVAL_INTERVAL", identity=False)
    checkpoint_interval: int = kconfig_field("CHECKPOINT_INTERVAL", identity=False)
    long_run_iterations: int = kconfig_field("LONG_RUN_ITERATIONS", identity=False)
    checkpoint_keep: int = kconfig_field("CHECKPOINT_KEEP", identity=False)
    checkpoint_keep_finished: bool = kconfig_field("CHECKPOINT_KEEP_FINISHED", identity=False)
    sample_tokens: int = kconfig_field("SAMPLE_TOKENS", identity=False)
    sample_prompt: str = kconfig_field("SAMPLE_PROMPT", identity=False)
    grad_clip: float = kconfig_field("GRAD_CLIP", low=0.0)
    oom_fallback: bool = kconfig_field("OOM_FALLBACK")

    def __post_init__(self) -> None:
        if not self.batch_size:
            return
        product = self.batch_size * self.grad_accumulation * self.gpus
        if product != self.global_batch:
            what = (
                f"GLOBAL_BATCH: BATCH_SIZE={self.batch_size} x GRAD_ACCUMULATION="
                f"{self.grad_accumulation} x GPUS={self.gpus} is {product} "
                f"(expected {self.global_batch})"
            )
            advice = f'set {self._fitting()}, in .config or with SET="..."'
            raise ConfigError(Problem(what, next=advice, code="config.conflict"))

    def _fitting(self) -> str:
        """Return the setting that makes the product equal to the global batch, or the reverse."""
        each, rest = divmod(self.global_batch, self.gpus)
        if rest == 0 and each % self.batch_size == 0:
            return f"GRAD_ACCUMULATION={each // self.batch_size}"
        if rest == 0 and each % self.grad_accumulation == 0:
            return f"BATCH_SIZE={each // self.grad_accumulation}"
        return f"GLOBAL_BATCH={self.batch_size * self.grad_accumulation * self.gpus}"

    def tokens_per_iteration(self, block_size: int) -> int:
        """Return the number of training tokens per optimizer step."""
        return self.global_batch * block_size


@dataclass(frozen=True)
class StudyConfig:
    """Options that select the runs to plan; not part of any run's identity."""

    # single_training, ra_mla_ablation_mode or test_matrix_mode
    mode: str = kconfig_field("RUN_MODE")
    study: str = kconfig_field("ABLATION_STUDY")
    # Of an own study, relative to the build folder; "" for the others.
    study_file: str = kconfig_field("ABLATION_STUDY_FILE")
    steps: str = kconfig_field("RA_MLA_ABLATION_STEPS")
    # grid, leave_one_out, add_one_in, cumulative or factorial
    design: str = kconfig_field("ABLATION_DESIGN")
    axes: str = kconfig_field("TEST_MATRIX_AXES")
    features: str = kconfig_field("ABLATION_FEATURES")
    seed_list: tuple[int, ...] = kconfig_field("SEED_LIST")
    output_dir: str = kconfig_field("OUTPUT_DIR")
    jobs: int = kconfig_field("JOBS")
    # Programs that are started after each finished run, each failed run, and once after the study; ""
    # for none.
    on_done_command: str = kconfig_field("ON_DONE_CMD")
    on_fail_command: str = kconfig_field("ON_FAIL_CMD")
    on_study_done_command: str = kconfig_field("ON_STUDY_DONE_CMD")
    # Finished runs of other code: stop, rerun or keep.
    on_stale: str = kconfig_field("ON_STALE")
    dry_run: bool = kconfig_field("DRY_RUN")


def _with_threads(values: Mapping[str, SymbolValue]) -> Mapping[str, SymbolValue]:
    """Return ``values`` with a number of CPU threads in place of 0."""
    if values.get("CPU_THREADS") != 0:
        return values
    alone = values["RUN_MODE"] == "single_training" and values["DEVICE"] == "cpu"
    threads = usable_cores() // max(1, int(values["GPUS"])) if alone else 1
    return {**values, "CPU_THREADS": max(1, threads)}


@dataclass(frozen=True)
class Config:
    """Configuration of one run. ``values`` are the symbol values that it was built from."""

    model: ModelConfig
    init: InitialWeightsOptions
    data: DataOptions
    train: TrainConfig
    schedule: ScheduleOptions
    optimizer: OptimizerOptions
    pruning: NoneOptions
    machine: MachineConfig
    repro: ReproConfig
    numerics: NumericsOptions
    seed: int = kconfig_field("SEED")
    run_time_limit_seconds: int = kconfig_field("RUN_TIME_LIMIT_SECONDS", identity=False)
    stall_limit_seconds: int = kconfig_field("STALL_LIMIT_SECONDS", identity=False)
    lease_seconds: int = kconfig_field("LEASE_SECONDS", identity=False)
    study: StudyConfig = dataclasses.field(kw_only=True, metadata={"identity": False})
    verdicts: VerdictOptions = dataclasses.field(kw_only=True, metadata={"identity": False})
    slurm: SlurmOptions = dataclasses.field(kw_only=True, metadata={"identity": False})
    telemetry: TelemetryOptions = dataclasses.field(kw_only=True, metadata={"identity": False})
    tracking: TrackingConfig = dataclasses.field(kw_only=True, metadata={"identity": False})
    environment: EnvironmentConfig = dataclasses.field(kw_only=True, metadata={"identity": False})
    values: Mapping[str, SymbolValue] = dataclasses.field(
        kw_only=True, repr=False, compare=False, metadata={"identity": False}
    )

    @classmethod
    def from_values(cls, values: Mapping[str, SymbolValue]) -> "Config":
        """Bind symbols to fields and check the rules across them.

        An automatic number of threads is replaced by the number on this machine. Raises ConfigError
        with all problems.
        """
        values = _with_threads(values)
        problems: list[Problem] = []

        def part(build: Callable[[], Any]) -> Any:
            try:
                return build()
            except ConfigError as error:
                problems.extend(error.problems)
                return None

        tokens = TOKENIZER_VOCAB[str(values["TOKENIZER"])]
        shape = part(lambda: from_symbols(ModelShape, values, vocab_size=tokens))
        attention = part(lambda: AttentionConfig.from_values(values))
        mlp = part(lambda: MlpConfig.from_values(values))
        others: dict[str, Callable[[], Any]] = {
            "optimizer": lambda: OPTIMIZERS.bind(values)[0],
            "pruning": lambda: PRUNERS.bind(values)[0],
            "tracking": lambda: TrackingConfig.from_values(values),
        }
        parts = {
            name: part(others.get(name) or partial(from_symbols, kind, values))
            for name, kind in _SECTIONS.items()
        }
        model = None
        if shape and attention and mlp:
            adapters = part(lambda: ADAPTERS.bind(values)) or ()
            parts_of_model = {"shape": shape, "attention": attention, "mlp": mlp}
            model = from_symbols(ModelConfig, values, **parts_of_model, adapters=adapters).sized()
        problems += broken_rules(values, attention, model, parts["machine"], parts["repro"])
        if problems:
            raise ConfigError(*problems)
        return from_symbols(cls, values, model=model, values=dict(values), **parts)

    def identity(self) -> dict[str, Any]:
        """Return all settings that can change a bit of the result, as plain JSON types."""
        return {**self._seedless_identity, "seed": self.seed}

    @cached_property
    def _seedless_identity(self) -> dict[str, Any]:
        return _identity(self, forms=True)

    @cached_property
    def _identity_members(self) -> dict[str, str]:
        return {name: canonical_json(part) for name, part in self._seedless_identity.items()}

    def with_seed(self, seed: int) -> "Config":
        """Return this configuration with another seed, on which no other symbol depends."""
        if seed not in self._by_seed:
            # A study may have thousands of runs: nothing is computed again, no field is checked.
            config = object.__new__(Config)
            vars(config).update(
                {field: vars(self)[field] for field in Config.__dataclass_fields__},
                seed=seed,
                values={**self.values, "SEED": seed},
                _seedless_identity=self._seedless_identity,
                _identity_members=self._identity_members,
            )
            self._by_seed[seed] = config
        return self._by_seed[seed]

    @cached_property
    def _by_seed(self) -> dict[int, "Config"]:
        return {}

    def function(self) -> dict[str, Any]:
        """Return the identity without the settings that only select a backend or numerics."""
        return _identity(self, forms=False)

    @cached_property
    def digest(self) -> str:
        """Return the SHA-256, in hex, of the identity's canonical JSON."""
        members = {**self._identity_members, "seed": canonical_json(self.seed)}
        text = ",".join(f'"{name}":{members[name]}' for name in sorted(members))
        return hashlib.sha256(f"{{{text}}}".encode()).hexdigest()

    @property
    def hash8(self) -> str:
        """Return the first eight hex digits of the digest."""
        return self.digest[:8]


# The classes of a configuration's sections, except the model.
_SECTIONS: dict[str, Any] = {
    field.name: get_type_hints(Config)[field.name]
    for field in dataclasses.fields(Config)
    if "symbol" not in field.metadata and field.name not in ("model", "values")
}


def _in_identity(field: dataclasses.Field, value: Any, *, forms: bool) -> bool:
    """Return whether the field of ``value`` can change a result and is not at its off-value."""
    metadata = field.metadata
    if not metadata.get("identity", True) or (metadata.get("form", False) and not forms):
        return False
    return metadata.get("off") is None or vars(value)[field.name] != metadata["off"]


def _identity(value: Any, *, forms: bool) -> Any:
    """Convert dataclasses to dictionaries of their identity fields and component name."""
    if isinstance(value, tuple):
        return [_identity(item, forms=forms) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = [f for f in dataclasses.fields(value) if _in_identity(f, value, forms=forms)]
    identity = {f.name: _identity(vars(value)[f.name], forms=forms) for f in fields}
    if isinstance(value, ModelConfig):
        # The hashes of existing runs contain the activation's name as a part of the shape.
        identity["shape"]["activation"] = identity["mlp"]["activation"].pop("name")
        if not identity["mlp"]["activation"]:
            del identity["mlp"]["activation"]
    if isinstance(value, Config) and value.machine.device == "cpu":
        # On a CPU, torch computes the loss in any case.
        identity["model"].pop("loss_backend", None)
    if isinstance(value, MlpConfig) and value.sizing != "params":
        # The hashes of existing runs do not contain it.
        del identity["model_params"]
    if isinstance(value, TrainConfig) and value.budget != "flops":
        # The hashes of existing runs do not contain it.
        del identity["max_flops"]
    name = vars(type(value)).get("name")
    return {"name": name, **identity} if isinstance(name, str) else identity
