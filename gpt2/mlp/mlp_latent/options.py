"""Options of the latent coupling: h ← h + α a Wᵀ, and the next block's c_k ← c_k + α h W."""

from dataclasses import dataclass
from typing import ClassVar

from gpt2.attention.latent.options import LatentOptions
from gpt2.mlp.options import BlockSite
from lib.binding import symbol
from lib.errors import ConfigError


@dataclass(frozen=True)
class MlpLatentOptions:
    """a is this block's c_k. Off means α = 0. The last block has no next c_k to write.

    ``tying``: tied uses one W (M × R) both ways, untied one each way, scalar one factor per head
    over copies of c_k laid along the hidden layer (W[m, r] = s_head(r) where m mod R = r).
    """

    name: ClassVar[str] = "mlp_latent"
    sized: ClassVar[bool] = False
    reads_weights: ClassVar[bool] = False

    alpha: float = symbol("MLP_LATENT_ALPHA", low=0.0, high=2.0)
    tying: str = symbol("MLP_LATENT_TYING")

    def check(self, hidden: int, site: BlockSite) -> None:
        """ConfigError where a head's scalar would scale no unit: it would never be trained."""
        latent, heads = self.latent_width(site), site.shape.n_head
        if self.tying == "scalar" and not heads <= latent <= hidden:
            raise ConfigError(
                f"MLP_LATENT_TYING: {latent} latent dimensions cannot have a scalar for each of "
                f"{heads} heads over {hidden} hidden units; take N_HEAD <= LATENT_DIM <= "
                "MLP_HIDDEN, or MLP_LATENT_TYING_TIED"
            )

    def in_block(self, site: BlockSite) -> bool:
        """Every block: the last still reads its own c_k."""
        return True

    def given_width(self) -> int:
        """It has no width of its own."""
        return 0

    def width_for(self, weights: float, hidden: int, site: BlockSite) -> float:
        """Never asked: it has no width of its own."""
        raise AssertionError("mlp_latent is not sized")

    def latent_width(self, site: BlockSite) -> int:
        """R of the block's latent projection."""
        assert isinstance(site.attention.projection, LatentOptions)
        return site.attention.projection.width(site.shape)

    def weights(self, hidden: int, width: int, site: BlockSite) -> int:
        """M·R tied; twice that untied, except in the last block, which writes to no c_k."""
        if self.tying == "scalar":
            return 0
        copies = 2 if self.tying == "untied" and not site.is_last else 1
        return copies * hidden * self.latent_width(site)

    def num_params(self, hidden: int, width: int, site: BlockSite) -> int:
        """The weights, or one scalar per head."""
        scalars = site.shape.n_head if self.tying == "scalar" else 0
        return self.weights(hidden, width, site) + scalars

    def flops_per_token(self, hidden: int, width: int, site: BlockSite) -> float:
        """Reads c_k, and writes the next one except in the last block."""
        directions = 1 if site.is_last else 2
        if self.tying == "scalar":
            return 2 * directions * hidden
        return 2 * directions * hidden * self.latent_width(site)

    def cached_numbers(self, width: int, length: int, site: BlockSite) -> int:
        """Nothing: attention keeps the c_k that was shifted."""
        return 0
