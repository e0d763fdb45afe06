"""Measurements of the Triton kernels of attention in Triton's interpreter.

    TRITON_INTERPRET=1 python -m tests.gpt2.attention.interpreted compositions TYPE [NAME]...
    TRITON_INTERPRET=1 python -m tests.gpt2.attention.interpreted quick|compiled

Prints a JSON object. compositions: name → errors of values and gradients relative to the norm,
against the row engine in float64.
"""

import json
import sys
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from gpt2.attention import tile_sizes
from gpt2.attention.attention import attend_rows, attend_tiles, build
from gpt2.attention.components import Window
from gpt2.attention.exposed import AttentionWeightsTap
from gpt2.attention.largest import largest_values
from gpt2.attention.options import (
    AttentionSinkOptions,
    AttentionWeightsOptions,
    RaCrossTokenOptions,
    ReciprocalOptions,
)
from gpt2.attention.projections import QKV
from gpt2.attention.rows import AttentionPlan
from gpt2.check.subject import fill_parameters
from gpt2.model import GPT
from gpt2.running.kernel_checks import attention_pass, relative_errors
from gpt2.shape import ModelShape
from tests.gpt2.builders import EVERYTHING, make_model_config

GPU_TILES = tile_sizes.TILES


@dataclass(frozen=True)
class Composition:
    """Heads and components of an attention call, and the tile of the kernels."""

    length: int = 37
    heads: tuple[int, int] = (2, 2)
    width: int = 16
    window: int = 0
    band: int = -1
    learnable: bool = False
    gate: tuple[str, str] | None = None
    top: int = 3
    reader: str = ""
    batch: int = 1
    # () selects the tile of a GPU.
    tile: tuple[int, ...] = (16, 16)
    sink: bool = False
    # Every other token has one of two keys, so that weights tie.
    tied: bool = False

    def plan(self, dtype: torch.dtype) -> AttentionPlan:
        """Build the components with parameters of ``dtype``."""
        heads = self.heads[0]
        shape = ModelShape(2, heads, heads * self.width, self.length, 64, 0.0, True, 50)
        pattern = Window(self.window or None)
        terms, gates, reader = [], [], None
        if self.band >= 0:
            terms = [build(shape, ReciprocalOptions(0.6, self.band, self.learnable)).to(dtype)]
        if self.gate:
            chosen = dict(alpha=0.7, topk=self.top, scale=1.5, bias=0.2)
            flags = dict(head_average=self.batch > 1, detach_stats=False)
            gates = [build(shape, RaCrossTokenOptions(*self.gate, **chosen, **flags)).to(dtype)]
        if self.reader:
            request = AttentionWeightsOptions(self.reader, 3, 0.5, detach=False)  # type: ignore[arg-type]
            reader = AttentionWeightsTap(request, pattern)
        sink = build(shape, AttentionSinkOptions()).to(dtype) if self.sink else None
        if sink:
            with torch.no_grad():
                sink.logit.copy_(torch.linspace(-1.0, 2.0, heads))
        return AttentionPlan(pattern, terms, gates, reader, sink=sink)

    def inputs(self, dtype: torch.dtype) -> list[Tensor]:
        """Draw q, k and v."""
        generator = torch.Generator().manual_seed(0)
        sizes = [
            (self.batch, count, self.length, self.width)
            for count in (self.heads[0], *self.heads[1:] * 2)
        ]
        q, k, v = (torch.randn(size, generator=generator).to(dtype) for size in sizes)
        if self.tied:
            k[:, :, ::2] = k[:, :, :2].repeat_interleave(self.length // 4, 2)
        return [q, k, v]


def use_tile(*sides: int) -> None:
    """Compute with tiles of so many rows and columns from now on."""
    tile_sizes.TILES = dict.fromkeys(GPU_TILES, (*sides, 4, 2)) if sides else GPU_TILES


def errors(case: Composition, dtype: torch.dtype) -> list[float]:
    """Return the error of every output and gradient."""
    use_tile(*case.tile)
    qkv = case.inputs(dtype)
    actual = attention_pass(attend_tiles, case.plan(torch.float32), qkv)
    exact = [x.double() for x in qkv]
    return relative_errors(actual, attention_pass(attend_rows, case.plan(torch.float64), exact))


GATES = [(m, apply) for m in ("topk", "max", "entropy", "rms") for apply in ("output", "weights")]
COMPOSITIONS = {
    "plain": Composition(),
    "one token": Composition(length=1, band=2, gate=("entropy", "output")),
    "grouped heads of width 20": Composition(
        heads=(4, 2), width=20, band=6, learnable=True, length=23
    ),
    "sliding": Composition(window=9, tile=(16, 32)),
    "sliding within the band": Composition(window=9, band=40, tile=(32, 16)),
    "band": Composition(band=5, length=50),
    "band of the token itself": Composition(band=0, length=20),
    "learnable band": Composition(band=19, learnable=True, batch=2),
    **{"-".join(each): Composition(band=5, gate=each) for each in GATES},
    "more than are visible": Composition(gate=("topk", "output"), top=12, length=20),
    "averaged": Composition(gate=("rms", "weights"), batch=2, length=20),
    "read topk": Composition(reader="topk", band=5),
    "read rms": Composition(reader="rms", window=9, gate=("entropy", "weights")),
    "sink": Composition(sink=True, window=9, heads=(4, 2)),
    "sink, read": Composition(sink=True, reader="topk", band=5),
    **{f"sink, {'-'.join(each)}": Composition(sink=True, band=5, gate=each) for each in GATES},
    "read none": Composition(reader="none", heads=(2, 1), length=20),
    "all": Composition(
        *(21, (2, 1)), window=9, band=40, learnable=True, gate=("topk", "weights"), reader="topk"
    ),
    "width 128": Composition(40, (1, 1), 128, band=9, gate=("topk", "output"), tile=(32, 32)),
    "ties, topk": Composition(length=40, gate=("topk", "output"), tied=True),
    "ties, max": Composition(length=40, gate=("max", "output"), tied=True),
    # Ends within a tile.
    "GPU, ra": Composition(140, width=64, band=64, tile=()),
    "GPU, sink": Composition(140, width=64, sink=True, tile=()),
    **{
        f"GPU, all, {apply}, {width}": Composition(
            140, width=width, band=64, gate=("topk", apply), top=8, reader="none", tile=()
        )
        for apply, width in (("output", 64), ("weights", 64), ("output", 128))
    },
}


def dropout() -> dict[str, Any]:
    """Recover the mask from a pass with an identity as values, and compare with autograd."""
    rate, length, width = 0.3, 24, 32
    case = Composition(length, (2, 2), width, band=7, gate=("rms", "output"), batch=2)
    plan = replace(case.plan(torch.float32), dropout=rate)
    q, k, v = case.inputs(torch.float32)
    identity = torch.eye(length, width).expand_as(v)

    def weights(seed: int, layer: int = 0) -> Tensor:
        """Return the weights that multiply the values, BNTS."""
        torch.manual_seed(seed)
        for _ in range(layer + 1):
            context = attend_tiles(QKV(q, k, identity), plan).context_BNTH
        return context[..., :length].detach()

    # By another tile, the same words.
    use_tile(16, 32)
    other_tile = weights(3) > 0
    use_tile(16, 16)
    first = weights(3)
    kept = first > 0
    seen = torch.ones(length, length, dtype=torch.bool).tril()
    pairs = [(weights(4) > 0, kept), (weights(3, layer=1) > 0, kept)]
    pairs += [(each, kept[0, 0]) for each in (kept[0, 1], kept[1, 0], kept[1, 1])]
    torch.manual_seed(3)
    actual = attention_pass(attend_tiles, plan, [q, k, v])
    # The row engine with this mask.
    exact = replace(case.plan(torch.float64), dropout=rate)
    with patch.object(AttentionPlan, "drop", lambda *given: kept.double() / (1 - rate)):
        expected = attention_pass(attend_rows, exact, [q.double(), k.double(), v.double()])
    return {
        "share": float(kept[..., seen].double().mean()),
        "pairs": int(seen.sum()) * 4,
        "same": torch.equal(kept, other_tile),
        "hidden": bool((first[..., ~seen] != 0).any()),
        # Shares of pairs on which another seed, layer, head or sequence agrees.
        "agreement": [float((a == b)[..., seen].double().mean()) for a, b in pairs],
        "errors": relative_errors(actual, expected),
    }


COMPILED: dict[str, dict[str, Any]] = {
    "ra, grouped, sliding, rope": {
        "terms": ("reciprocal",),
        "projection": "grouped",
        "pattern": "sliding",
        "positions": "rope",
    },
    "everything, on scores": EVERYTHING
    | {
        "parts": {
            "ra_cross_token": {"mode": "entropy", "apply": "weights"},
            "mlp_cross_token": {"detach_weights": False},
            "reciprocal": {"learnable": True},
        }
    },
}


def compiled() -> dict[str, Any]:
    """Return whether compilation, without a graph break, changes loss or gradients."""
    use_tile(16, 16)
    found = {}
    for name, given in COMPILED.items():
        sizes = {"n_head": 2, "n_embd": 32, "block_size": 20}
        gpt = GPT(make_model_config(**given | sizes, attention_backend="triton"))
        gpt.init_weights(0)
        fill_parameters(gpt)
        idx = torch.arange(20).view(1, 20)
        torch._dynamo.reset()
        results = []
        for forward in (gpt, torch.compile(gpt, backend="aot_eager", fullgraph=True)):
            gpt.zero_grad(set_to_none=True)
            loss = forward(idx, idx)
            loss.backward()
            results.append(
                [loss.detach(), *(p.grad for p in gpt.parameters() if p.grad is not None)]
            )
        found[name] = max(relative_errors(results[1], [x.double() for x in results[0]]))
    return found


def largest() -> dict[str, Any]:
    """Return whether the largest values of rows of several lengths are those of torch, with ties."""
    found = {}
    for rows, width, k in ((7, 37, 8), (3, 3, 3), (2, 100, 33)):
        weights = torch.rand(rows, width).mul(20).round().div(20)
        actual = largest_values(weights, k).sort().values
        expected = weights.topk(k, sorted=True).values.flip(-1)
        found[f"{rows} x {width}, {k}"] = torch.equal(actual, expected)
    return found


def quick() -> dict[str, Any]:
    """Return the measurements of every test run."""
    few = ("all", "sink, entropy-weights")
    found = {name: errors(COMPOSITIONS[name], torch.float32) for name in few}
    return {"compositions": found, "dropout": dropout(), "largest": largest()}


def main() -> None:
    torch.set_num_threads(1)
    subject, *args = sys.argv[1:]
    if subject == "compositions":
        dtype = getattr(torch, args[0])
        found = {name: errors(COMPOSITIONS[name], dtype) for name in args[1:] or COMPOSITIONS}
    else:
        found = {"quick": quick, "compiled": compiled}[subject]()
    print(json.dumps(found))


if __name__ == "__main__":
    main()
