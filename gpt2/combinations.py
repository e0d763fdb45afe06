"""Runs that are combinations of settings: a test matrix, a sweep, a design over features."""

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

# More combinations than this are more often a slip than a wish.
_MANY = 500
_BATCH = ("GLOBAL_BATCH", "BATCH_SIZE", "GPUS")


@dataclass(frozen=True)
class Sweep:
    """Axes as a user typed them, or the path of a file that holds them; ``samples`` cells drawn at
    random, or all of them where it is 0."""

    text: str
    samples: int = 0

    @property
    def axes(self) -> str:
        """``NAME=value,value NAME=…``. ConfigError when the file cannot be read."""
        if "=" in self.text:
            return self.text
        try:
            lines = Path(self.text).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            what = f"{self.text!r} is neither NAME=value,value nor a file that can be read: {error}"
            raise ConfigError(Problem(what, "SWEEP")) from None
        return " ".join(line.split("#")[0].strip() for line in lines)


def sweep(
    tree: Tree, layers: Sequence[Layer], base: Config, asked: Sweep, *, yes: bool = False
) -> Combined[Config]:
    """The cells of a sweep over any configuration, as one training each."""
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
    """The cells of the configured test matrix: its axes' grid, or a design over its features."""
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
    """Planning resolves every combination, so the question comes before that."""
    if count > _MANY:
        confirm(f"plan {count:,} combinations?", yes)


def _resolve(tree: Tree, layers: Sequence[Layer], where: str, each: Cell) -> Config:
    """The cell's configuration; its accumulation follows a batch that is swept.

    GLOBAL_BATCH is what the result depends on, so a cell that changes the micro-batch keeps it.
    """
    name = f"{where} {each.slug}"
    layer = Layer.of("axis", name, each.delta)
    if "GRAD_ACCUMULATION" in each.delta or not each.delta.keys() & set(_BATCH):
        return resolve_config(tree, [*layers, layer])
    values = tree.resolve([*layers, layer]).values
    batch, micro, gpus = (int(values[name]) for name in _BATCH)
    settings = {**each.delta, "GRAD_ACCUMULATION": max(1, batch // (micro * gpus))}
    return resolve_config(tree, [*layers, Layer.of("axis", name, settings)])
