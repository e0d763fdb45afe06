"""Options of the latent coupling: h ← h + α a Wᵀ, and the next block's c_k ← c_k + α h W."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.options import LatentOptions
from gpt2.mlp.options import LayerSpec
from lib.config.field import SymbolValue, kconfig_field
from lib.errors import ConfigError, Problem


@dataclass(frozen=True)
class MlpLatentOptions:
    """Options of the latent coupling; a is the block's c_k, α = 0 disables the coupling.

    The last block does not write: it has no next c_k. ``tying``: tied uses one W (M × R) for both
    directions, untied one per direction, scalar one factor per head over copies of c_k repeated
    along the hidden layer (W[m, r] = s_head(r) if m mod R = r).
    """

    name: ClassVar[str] = "mlp_latent"
    sized: ClassVar[bool] = False
    reads_weights: ClassVar[bool] = False
    off: ClassVar[Mapping[str, SymbolValue]] = {"MLP_LATENT_ALPHA": "0.0"}

    alpha: float = kconfig_field("MLP_LATENT_ALPHA", low=0.0, high=2.0)
    tying: str = kconfig_field("MLP_LATENT_TYING")

    def check(self, hidden: int, site: LayerSpec) -> None:
        """Raise ConfigError if a head's scalar would scale no unit and could not be trained."""
        latent, heads = self.latent_width(site), site.shape.n_head
        if self.tying == "scalar" and not heads <= latent <= hidden:
            raise ConfigError(
                Problem(
                    "MLP_LATENT_TYING: scalar requires N_HEAD <= LATENT_DIM <= MLP_HIDDEN, "
                    f"got {heads}, {latent}, {hidden}",
                    next="change these sizes, or set MLP_LATENT_TYING_TIED",
                    code="config.conflict",
                )
            )

    def in_block(self, site: LayerSpec) -> bool:
        """Return True: even the last block reads its own c_k."""
        return True

    def given_width(self) -> int:
        """Return 0: the coupling has no free width."""
        return 0

    def width_for(self, weights: float, hidden: int, site: LayerSpec) -> float:
        """Raise AssertionError: the coupling has no free width."""
        raise AssertionError("mlp_latent is not sized")

    def latent_width(self, site: LayerSpec) -> int:
        """Return R of the block's latent projection."""
        assert isinstance(site.attention.projection, LatentOptions)
        return site.attention.projection.width(site.shape)

    def weights(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return M·R if tied, twice that if untied (once in the last block), 0 for scalar tying."""
        if self.tying == "scalar":
            return 0
        copies = 2 if self.tying == "untied" and not site.is_last else 1
        return copies * hidden * self.latent_width(site)

    def num_params(self, hidden: int, width: int, site: LayerSpec) -> int:
        """Return the weights, or one scalar per head."""
        scalars = site.shape.n_head if self.tying == "scalar" else 0
        return self.weights(hidden, width, site) + scalars

    def flops_per_token(self, hidden: int, width: int, site: LayerSpec) -> float:
        """Return the FLOPs of reading c_k and, except in the last block, writing the next one."""
        directions = 1 if site.is_last else 2
        if self.tying == "scalar":
            return 2 * directions * hidden
        return 2 * directions * hidden * self.latent_width(site)

    def cached_numbers(self, width: int, length: int, site: LayerSpec) -> int:
        """Return 0: attention caches the shifted c_k."""
        return 0
