"""The configuration of a GPT-2 model: shape, attention, MLP and norms, with parameters and FLOPs.

Imports no torch. The model and its parts import this module, not the configuration of a run.
"""

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import ClassVar

from gpt2.attention.backends import Backend, Place, choose_backend
from gpt2.attention.config import AttentionConfig
from gpt2.attention.options import PartOptions
from gpt2.mlp.options import LayerSpec, MlpConfig
from gpt2.shape import Cost, ModelShape
from gpt2.weights.options import LoraOptions
from lib.config.field import component_field, kconfig_field
from lib.config.registry import Registry
from lib.config.small_form import SmallForm


def _small_loss(form: SmallForm, name: str) -> str:
    """Return torch for the kernel that a CPU lacks."""
    return "torch" if form.values[name] == "triton" else str(form.values[name])


class NormOptions(PartOptions):
    """Options of all norms of a model: two in a block, and one before the head."""

    def cost(self, shape: ModelShape) -> Cost:
        """Return the parameters of one norm; its FLOPs are not counted."""
        raise NotImplementedError


@dataclass(frozen=True)
class LayernormOptions(NormOptions):
    """GPT-2's LayerNorm (Ba et al. 2016, arXiv 1607.06450)."""

    name: ClassVar[str] = "layernorm"

    def cost(self, shape: ModelShape) -> Cost:
        """Return a scale, and a bias if the model has biases."""
        return Cost(vectors=shape.n_embd * (1 + shape.bias))


@dataclass(frozen=True)
class RmsnormOptions(NormOptions):
    """RMSNorm (Zhang and Sennrich 2019, arXiv 1910.07467): no mean is subtracted, no bias added."""

    name: ClassVar[str] = "rmsnorm"

    def cost(self, shape: ModelShape) -> Cost:
        """Return a scale."""
        return Cost(vectors=shape.n_embd)


NORMS: Registry[NormOptions] = Registry("norm", LayernormOptions, RmsnormOptions, choice="NORM")


@dataclass(frozen=True)
class ModelConfig:
    """Configuration of a GPT-2 model: shape, attention, MLP and norms."""

    shape: ModelShape
    attention: AttentionConfig
    mlp: MlpConfig
    # Recompute each block's activations in the backward pass instead of storing them.
    grad_checkpointing: bool = kconfig_field("GRAD_CHECKPOINTING", form=True)
    # auto, torch or triton: operations on the logits.
    loss_backend: str = kconfig_field("LOSS_BACKEND", form=True, off="torch", small=_small_loss)
    # Coefficient of mean log² Z in the loss of training.
    z_loss: float = kconfig_field("Z_LOSS", low=0.0, high=1.0, off=0.0)
    # The head has a matrix of its own in place of the token embedding.
    untied_head: bool = kconfig_field("UNTIED_HEAD", off=False)
    norm: NormOptions = component_field(NORMS, off=LayernormOptions())
    # Trainable parameters beside the others, which are then frozen.
    adapters: tuple[LoraOptions, ...] = field(default=(), metadata={"off": ()})

    def sites(self) -> list[LayerSpec]:
        """Return one site per block."""
        return [LayerSpec(self.shape, self.attention, i) for i in range(self.shape.n_layer)]

    @property
    def reads_weights(self) -> frozenset[bool]:
        """Return whether MLPs read attention weights: one value for all blocks, or both."""
        return frozenset(self.mlp.request(site) is not None for site in self.sites())

    def backends(self, place: Place) -> set[Backend]:
        """Return the attention backends of the blocks; raises ConfigError as ``choose_backend``."""
        attention, shape = self.attention, self.shape
        return {choose_backend(attention, shape, reads, place) for reads in self.reads_weights}

    def hidden_widths(self) -> list[int]:
        """Return the different widths of the blocks' hidden layers, in ascending order."""
        return sorted({self.mlp.size(site).hidden for site in self.sites()})

    def sized(self) -> "ModelConfig":
        """Return the model with MLPs of the width that its number of parameters determines."""
        if self.mlp.sizing != "params":
            return self
        return replace(self, mlp=self.mlp.with_params(self.sites()[0], self._params_beside_mlps()))

    def num_params(self) -> int:
        """Return the number of parameters; a tied head is that of the token embedding."""
        return self.base_params() + sum(self._adapters(site).params for site in self.sites())

    def base_params(self) -> int:
        """Return the number of parameters without adapters."""
        return self._params_beside_mlps() + sum(self.mlp.cost(site).params for site in self.sites())

    def _adapters(self, site: LayerSpec) -> Cost:
        """Return the cost of the adapters of a block."""
        width, hidden = self.shape.n_embd, self.mlp.size(site).hidden
        matrices = {
            "attn.c_attn": width + self.attention.projection.expanded_numbers(self.shape) + width,
            "attn.c_proj": 2 * width,
            "mlp.c_fc": width + self.mlp.activation.fc_outputs * hidden,
            "mlp.c_proj": hidden + width,
        }
        return Cost.of(part.cost(matrices) for part in self.adapters)

    def _params_beside_mlps(self) -> int:
        shape = self.shape
        norm = self.norm.cost(shape).params
        positions = 0 if self.attention.positions.rotates else shape.block_size
        tables = shape.padded_vocab_size * (1 + self.untied_head) + positions
        blocks = (self.attention.cost(shape, i).params + 2 * norm for i in range(shape.n_layer))
        return tables * shape.n_embd + sum(blocks) + norm

    def pairs_per_token(self) -> float:
        """Return the mean number of query-key pairs per token and head at full context."""
        return self.attention.pattern.mean_keys(self.shape.block_size)

    def reads(self) -> int:
        """Return the number of keys that a head reads for the last token of a full context."""
        length, keys = self.shape.block_size, self.attention.pattern.mean_keys
        return round(length * keys(length) - (length - 1) * keys(length - 1))

    def flops_per_token(self) -> float:
        """Return the training FLOPs per token at full context: forward, plus twice that backward.

        Of frozen matrices, backward computes the gradient of the inputs only. Scores, and weighted
        values, have the gradients of both factors.
        """
        return self._flops_per_token

    @cached_property
    def _flops_per_token(self) -> float:
        # Once for all seeds of a step.
        attention, mlp = self.attention.cost, self.mlp.cost
        blocks = Cost.of(
            part for site in self.sites() for part in (attention(self.shape, site.block), mlp(site))
        )
        adapters = sum(self._adapters(site).flops for site in self.sites())
        matrices = 2 * (blocks.weights + self.shape.padded_vocab_size * self.shape.n_embd)
        return (2 if self.adapters else 3) * matrices + 3 * (blocks.other_flops + adapters)
