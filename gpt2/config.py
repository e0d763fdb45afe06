"""The typed, frozen configuration of a run. The only reader of the generated ``config.py``.

Every run is built from symbol values by ``Config.from_values``. The steps of a study use the same
path, so ranges, dependencies and rules apply to them too.
"""

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpt2.attention.options import AttentionConfig
from gpt2.data.options import DataConfig, vocab_size
from gpt2.mlp.options import BlockSite, MlpConfig
from gpt2.rules import broken_rules
from gpt2.shape import Shape
from gpt2.weights.options import InitOptions
from lib.binding import Value, bind, symbol
from lib.environment.options import EnvironmentConfig
from lib.errors import ConfigError, Problem
from lib.files import canonical_json
from lib.kconfig import read_constants
from lib.machine.options import MachineConfig
from lib.numerics.options import NumericsOptions
from lib.optim import OPTIMIZERS
from lib.optim.schedule import ScheduleOptions
from lib.pruning import PRUNERS
from lib.repro.options import ReproConfig
from lib.telemetry.options import TelemetryOptions
from lib.tracking.options import TrackingConfig
from lib.watch.options import WatchOptions


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a GPT-2 model: shape, attention and MLP."""

    shape: Shape
    attention: AttentionConfig
    mlp: MlpConfig
    # Recompute each block's activations in the backward pass instead of storing them.
    grad_checkpointing: bool = symbol("GRAD_CHECKPOINTING", form=True)

    def sites(self) -> list[BlockSite]:
        """Return one site per block."""
        return [BlockSite(self.shape, self.attention, i) for i in range(self.shape.n_layer)]

    def num_params(self) -> int:
        """Return the number of parameters; the output head is tied to the token embedding."""
        shape = self.shape
        norm = shape.n_embd * (2 if shape.bias else 1)
        embeddings = shape.padded_vocab_size * shape.n_embd
        embeddings += self.attention.positions.num_params(shape)
        attention = self.attention.num_params(shape)
        blocks = sum(attention + self.mlp.num_params(site) + 2 * norm for site in self.sites())
        return embeddings + blocks + norm

    def cached_numbers(self, length: int) -> int:
        """Return the KV cache size of a sequence of ``length`` tokens, in elements."""
        attention = self.attention.cached_numbers(self.shape, length)
        return sum(attention + self.mlp.cached_numbers(site, length) for site in self.sites())

    def pairs_per_token(self) -> float:
        """Return the mean number of query-key pairs per token and head at full context."""
        return self.attention.pattern.mean_keys(self.shape.block_size)

    def reads(self) -> int:
        """Return the number of keys that a head reads for the last token of a full context."""
        length, keys = self.shape.block_size, self.attention.pattern.mean_keys
        return round(length * keys(length) - (length - 1) * keys(length - 1))

    def flops_per_token(self) -> float:
        """Return the training FLOPs per token at full context: forward, plus twice that backward."""
        attention = self.attention.flops_per_token(self.shape)
        blocks = sum(attention + self.mlp.flops_per_token(site) for site in self.sites())
        return 3 * (blocks + 2 * self.shape.padded_vocab_size * self.shape.n_embd)


@dataclass(frozen=True)
class TrainConfig:
    """Options of the training loop: budget, batch size and intervals."""

    # iterations, tokens or time
    budget: str = symbol("BUDGET")
    max_iters: int = symbol("MAX_ITERS")
    max_tokens: int = symbol("MAX_TOKENS")
    max_time_seconds: int = symbol("GPT2_MAX_TIME")
    # Sequences per optimizer step, all processes together.
    global_batch: int = symbol("GLOBAL_BATCH")
    # Sequences per forward pass of one process.
    batch_size: int = symbol("BATCH_SIZE")
    grad_accumulation: int = symbol("GRAD_ACCUMULATION")
    gpus: int = symbol("GPUS")
    log_interval: int = symbol("LOG_INTERVAL", identity=False)
    first_steps: int = symbol("FIRST_STEPS", identity=False)
    first_steps_speed: int = symbol("FIRST_STEPS_SPEED", identity=False)
    eval_interval: int = symbol("EVAL_INTERVAL", identity=False)
    checkpoint_interval: int = symbol("CHECKPOINT_INTERVAL", identity=False)
    long_run_iterations: int = symbol("LONG_RUN_ITERATIONS", identity=False)
    checkpoint_keep: int = symbol("CHECKPOINT_KEEP", identity=False)
    sample_tokens: int = symbol("SAMPLE_TOKENS", identity=False)
    sample_prompt: str = symbol("SAMPLE_PROMPT", identity=False)
    grad_clip: float = symbol("GRAD_CLIP", low=0.0)
    oom_fallback: bool = symbol("OOM_FALLBACK")

    def __post_init__(self) -> None:
        product = self.batch_size * self.grad_accumulation * self.gpus
        if product != self.global_batch:
            what = (
                f"GLOBAL_BATCH: BATCH_SIZE={self.batch_size} x GRAD_ACCUMULATION="
                f"{self.grad_accumulation} x GPUS={self.gpus} is {product} "
                f"(expected {self.global_batch})"
            )
            raise ConfigError(Problem(what, code="config.conflict"))

    def tokens_per_iteration(self, block_size: int) -> int:
        """Return the number of training tokens per optimizer step."""
        return self.global_batch * block_size


@dataclass(frozen=True)
class StudyConfig:
    """Options that select the runs to plan; not part of any run's identity."""

    # single_training, ra_mla_ablation_mode or test_matrix_mode
    mode: str = symbol("RUN_MODE")
    study: str = symbol("ABLATION_STUDY")
    steps: str = symbol("RA_MLA_ABLATION_STEPS")
    # grid, leave_one_out, add_one_in, cumulative or factorial
    design: str = symbol("ABLATION_DESIGN")
    axes: str = symbol("TEST_MATRIX_AXES")
    features: str = symbol("ABLATION_FEATURES")
    seed_list: tuple[int, ...] = symbol("SEED_LIST")
    output_dir: str = symbol("OUTPUT_DIR")
    jobs: int = symbol("JOBS")
    dry_run: bool = symbol("DRY_RUN")
    # Plan an eager run beside each compiled run.
    eager_twin: bool = symbol("COMPILE_EAGER_TWIN")


@dataclass(frozen=True)
class Config:
    """Configuration of one run. ``values`` are the symbol values that it was built from."""

    model: ModelConfig
    init: InitOptions
    data: DataConfig
    train: TrainConfig
    schedule: ScheduleOptions
    optimizer: Any
    pruning: Any
    machine: MachineConfig
    repro: ReproConfig
    numerics: NumericsOptions
    seed: int = symbol("SEED")
    run_time_limit_seconds: int = symbol("RUN_TIME_LIMIT_SECONDS", identity=False)
    study: StudyConfig = dataclasses.field(kw_only=True, metadata={"identity": False})
    telemetry: TelemetryOptions = dataclasses.field(kw_only=True, metadata={"identity": False})
    watch: WatchOptions = dataclasses.field(kw_only=True, metadata={"identity": False})
    tracking: TrackingConfig = dataclasses.field(kw_only=True, metadata={"identity": False})
    environment: EnvironmentConfig = dataclasses.field(kw_only=True, metadata={"identity": False})
    values: Mapping[str, Value] = dataclasses.field(
        kw_only=True, repr=False, compare=False, metadata={"identity": False}
    )

    @classmethod
    def from_values(cls, values: Mapping[str, Value]) -> "Config":
        """Bind symbols to fields and check the rules across them.

        Raises ConfigError with all problems.
        """
        problems: list[Problem] = []

        def part(build: Any) -> Any:
            try:
                return build()
            except ConfigError as error:
                problems.extend(error.problems)
                return None

        tokens = vocab_size(str(values["TOKENIZER"]))
        parts = {
            "shape": part(lambda: bind(Shape, values, vocab_size=tokens)),
            "attention": part(lambda: AttentionConfig.from_values(values)),
            "mlp": part(lambda: MlpConfig.from_values(values)),
            "init": part(lambda: bind(InitOptions, values)),
            "data": part(lambda: bind(DataConfig, values)),
            "train": part(lambda: bind(TrainConfig, values)),
            "schedule": part(lambda: bind(ScheduleOptions, values)),
            "optimizer": part(lambda: OPTIMIZERS.bind(values)[0]),
            "pruning": part(lambda: PRUNERS.bind(values)[0]),
            "machine": part(lambda: bind(MachineConfig, values)),
            "repro": part(lambda: bind(ReproConfig, values)),
            "numerics": part(lambda: bind(NumericsOptions, values)),
            "study": part(lambda: bind(StudyConfig, values)),
            "telemetry": part(lambda: bind(TelemetryOptions, values)),
            "watch": part(lambda: bind(WatchOptions, values)),
            "tracking": part(lambda: TrackingConfig.from_values(values)),
            "environment": part(lambda: bind(EnvironmentConfig, values)),
        }
        shape, attention, mlp = (parts.pop(name) for name in ("shape", "attention", "mlp"))
        model = None
        if shape and attention and mlp:
            model = bind(ModelConfig, values, shape=shape, attention=attention, mlp=mlp)
        problems += broken_rules(values, attention, model, parts["machine"], parts["repro"])
        if problems:
            raise ConfigError(*problems)
        return bind(cls, values, model=model, values=dict(values), **parts)

    def identity(self) -> dict[str, Any]:
        """Return all settings that can change a bit of the result, as plain JSON types."""
        return _identity(self, forms=True)

    def function(self) -> dict[str, Any]:
        """Return the identity without the settings that only select a backend or numerics."""
        return _identity(self, forms=False)

    @property
    def digest(self) -> str:
        """Return the SHA-256, in hex, of the identity's canonical JSON."""
        return identity_digest(self.identity())

    @property
    def hash8(self) -> str:
        """Return the first eight hex digits of the digest."""
        return self.digest[:8]


def identity_digest(identity: Mapping[str, Any]) -> str:
    """Return the SHA-256, in hex, of an identity returned by ``Config`` or read from a file."""
    return hashlib.sha256(canonical_json(identity).encode()).hexdigest()


def load_config(build_dir: Path) -> Config:
    """Load the configuration of ``build_dir``.

    Raises ConfigError if there is none or a rule is broken.
    """
    return Config.from_values(read_constants(build_dir / "config.py"))


def _identity(value: Any, *, forms: bool) -> Any:
    """Convert dataclasses to dictionaries of their identity fields and component name."""
    if isinstance(value, tuple):
        return [_identity(item, forms=forms) for item in value]
    if not dataclasses.is_dataclass(value):
        return value
    fields = (f for f in dataclasses.fields(value) if f.metadata.get("identity", True))
    selected = (f for f in fields if forms or not f.metadata.get("form", False))
    identity = {f.name: _identity(vars(value)[f.name], forms=forms) for f in selected}
    name = vars(type(value)).get("name")
    return {"name": name, **identity} if isinstance(name, str) else identity
