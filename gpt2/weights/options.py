"""Options of the initial weights and of adapters on them; does not import torch."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import PartOptions
from gpt2.shape import Cost
from lib.config.field import SymbolValue, kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import at_most
from lib.errors import ConfigError, Problem

_PATH = ("/", "./", "../", "~/")
# Names by the prefix: a model on the Hugging Face hub, with or without owner; a run directory.
_NAMES = {
    "hf": re.compile(r"[a-z0-9][\w.-]*(/[a-z0-9][\w.-]*)?", re.ASCII | re.IGNORECASE),
    "run": re.compile(r"[a-z0-9][\w.-]*", re.ASCII | re.IGNORECASE),
}
# Iteration of a kept checkpoint, behind the name of a run.
_ITERATION = re.compile(r"@([0-9]{1,9})$", re.ASCII)


@dataclass(frozen=True)
class InitialWeightsOptions:
    """Initial weights: "" for random ones, ``hf:…`` a folder or model of the hub, ``run:…`` a finished run."""

    init_from: str = kconfig_field("INIT_FROM")
    # Other values for the same seed.
    init_stream: int = kconfig_field("INIT_STREAM", off=0)

    def __post_init__(self) -> None:
        if not self.init_from:
            return
        if self.init_stream:
            what = (
                f"INIT_STREAM: no effect on {self.init_from} (expected 0, got {self.init_stream})"
            )
            raise ConfigError(Problem(what, next="type: SET=INIT_STREAM=0", code="config.conflict"))
        names = _NAMES.get(self.init_from.partition(":")[0])
        if names is None or not (self.is_path or names.fullmatch(self.name)):
            what = f"INIT_FROM: invalid value {self.init_from!r}"
            advice = "set run:NAME of a run directory, hf:NAME of the hub, or hf:PATH "
            advice += "(PATH begins with / ./ ../ or ~/)"
            raise ConfigError(Problem(what, next=advice, code="config.invalid-value"))

    @property
    def name(self) -> str:
        """Return the path or name behind the prefix, without the iteration of a run."""
        name = self.init_from.partition(":")[2]
        return _ITERATION.sub("", name) if self.is_run else name

    @property
    def iteration(self) -> int | None:
        """Return the iteration of the run's checkpoint; None for the final weights."""
        match = _ITERATION.search(self.init_from) if self.is_run else None
        return int(match[1]) if match else None

    @property
    def is_run(self) -> bool:
        return self.init_from.startswith("run:")

    @property
    def is_path(self) -> bool:
        return self.name.startswith(_PATH)

    @property
    def is_hub(self) -> bool:
        return not self.is_run and not self.is_path


@dataclass(frozen=True)
class LoraOptions(PartOptions):
    """Low-rank adapters (Hu et al. 2021, arXiv 2106.09685): W + α/r · B A with W frozen.

    ``base`` is how W is stored: in fp32, or in codes as QLoRA (Dettmers et al. 2023, arXiv 2305.14314).
    """

    name: ClassVar[str] = "lora"
    off: ClassVar[Mapping[str, SymbolValue]] = {"LORA_ALPHA": "0.0"}

    rank: int = kconfig_field("LORA_RANK", small=at_most(4))
    alpha: float = kconfig_field("LORA_ALPHA", low=0.0, high=1e4)
    dropout: float = kconfig_field("LORA_DROPOUT", low=0.0, high=0.9)
    attention_in: bool = kconfig_field("LORA_ATTENTION_IN")
    attention_out: bool = kconfig_field("LORA_ATTENTION_OUT")
    mlp_in: bool = kconfig_field("LORA_MLP_IN")
    mlp_out: bool = kconfig_field("LORA_MLP_OUT")
    # fp32, int8, nf4 or fp4
    base: str = kconfig_field("LORA_BASE", off="fp32")

    def __post_init__(self) -> None:
        if not self.matrices:
            what = "LORA_MLP_IN: n, as all other LORA_ projections (expected one at least)"
            advice = "type: SET=LORA_MLP_IN=y"
            raise ConfigError(Problem(what, next=advice, code="config.conflict"))

    @property
    def scale(self) -> float:
        """Return α/r."""
        return self.alpha / self.rank

    @property
    def matrices(self) -> list[str]:
        """Return the names, within a block, of the matrices with an adapter."""
        adapted = {
            "attn.c_attn": self.attention_in,
            "attn.c_proj": self.attention_out,
            "mlp.c_fc": self.mlp_in,
            "mlp.c_proj": self.mlp_out,
        }
        return [name for name, on in adapted.items() if on]

    def cost(self, matrices: Mapping[str, int]) -> Cost:
        """Return A and B in a block with these ``matrices``: name → outputs plus inputs."""
        return Cost(weights=self.rank * sum(matrices[name] for name in self.matrices))


ADAPTERS: Registry[LoraOptions] = Registry("adapter", LoraOptions)
