"""Combinations of settings as runs: test matrices, sweeps, and designs over features."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from gpt2.ablation.resolve import resolve_config
from gpt2.config import Config
from lib.cli import confirm
from lib.designs.axes import Axis, parse_axes
from lib.designs.cell import Cell
from lib.designs.combine import Combined, combine, combine_grid
from lib.designs.features import DESIGNS, parse_features
from lib.designs.grid import grid, sample, size
from lib.errors import ConfigError, Problem
from lib.kconfig import Layer, Tree

# Ask for confirmation above this number of combinations: more is usually a typing error.
_CONFIRM_ABOVE = 500
_BATCH = ("GLOBAL_BATCH", "BATCH_SIZE", "GPUS")


@dataclass(frozen=True)
class Sweep:
    """Axes of a sweep as typed by the user, or the path of a file with axes.

    ``samples`` is the number of randomly drawn cells; 0 means all cells.
    """

    text: str
    samples: int = 0

    @property
    def axes(self) -> str:
        """Return the axes as ``NAME=value,value NAME=…``.

        Raises ConfigError if the file cannot be read.
        """
        if "=" in self.text:
            return self.text
        try:
            lines = Path(self.text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = f"expected NAME=value,value or a readable file, got {self.text!r}: {error}"
            raise ConfigError(Problem(what, "SWEEP", code="usage.invalid-axis")) from None
        return " ".join(line.split("#")[0].strip() for line in lines)


def sweep(
    tree: Tree, layers: Sequence[Layer], base: Config, asked: Sweep, *, yes: bool = False
) -> Combined[Config]:
    """Return the cells of a sweep over ``base``, one single training per cell."""
    axes = parse_axes(tree, asked.axes, "SWEEP")
    if asked.samples:
        cells = sample(axes, asked.samples, base.seed)
    else:
        cells = _all(axes, "SWEEP", yes)
    single = Layer.of("command line", "SWEEP", {"SINGLE_TRAINING": True})
    layers = [*layers, single]
    resolve = partial(_resolve, tree, layers, "SWEEP")
    return combine_grid(tree, layers, cells, resolve, "SWEEP")


def matrix(
    tree: Tree, layers: Sequence[Layer], base: Config, *, yes: bool = False
) -> Combined[Config]:
    """Return the cells of the configured test matrix: a grid of axes, or a design over features."""
    design = base.study.design
    if design == "grid":
        where = "TEST_MATRIX_AXES"
        axes = parse_axes(tree, base.study.axes, where)
        cells = _all(axes, where, yes)
        resolve = partial(_resolve, tree, layers, where)
        return combine_grid(tree, layers, cells, resolve, where)
    where = "ABLATION_FEATURES"
    features = parse_features(tree, layers, base.study.features, where)
    if design == "factorial":
        _confirm(2 ** len(features), yes)
    return combine(DESIGNS[design](features), partial(_resolve, tree, layers, where))


def _all(axes: Sequence[Axis], where: str, yes: bool) -> list[Cell]:
    _confirm(size(axes), yes)
    return grid(axes, where)


def _confirm(count: int, yes: bool) -> None:
    """Ask for confirmation of many combinations, before planning resolves each of them."""
    if count > _CONFIRM_ABOVE:
        confirm(f"plan {count:,} combinations?", yes)


def _resolve(tree: Tree, layers: Sequence[Layer], where: str, each: Cell) -> Config:
    """Return the cell's configuration, with GRAD_ACCUMULATION adapted to a swept batch size.

    The result depends on GLOBAL_BATCH, so a cell that changes the micro-batch keeps GLOBAL_BATCH.
    """
    name = f"{where} {each.slug}"
    layer = Layer.of("axis", name, each.delta)
    if "GRAD_ACCUMULATION" in each.delta or not each.delta.keys() & set(_BATCH):
        return resolve_config(tree, [*layers, layer])
    values = tree.resolve([*layers, layer]).values
    batch, micro, gpus = (int(values[name]) for name in _BATCH)
    settings = {**each.delta, "GRAD_ACCUMULATION": max(1, batch // (micro * gpus))}
    return resolve_config(tree, [*layers, Layer.of("axis", name, settings)])
