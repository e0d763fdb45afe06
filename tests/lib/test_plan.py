"""Seeds, blocks, directories, and test matrices on a small Kconfig tree of their own."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from lib.errors import ConfigError
from lib.kconfig import Layer, Tree
from lib.plan import Variant, parse_seeds, plan_matrix, plan_runs

KCONFIG = """
choice OPTIMIZER
    prompt "Optimizer"
    default OPTIMIZER_ADAMW

config OPTIMIZER_ADAMW
    bool "adamw"

config OPTIMIZER_SPAM
    bool "spam"

endchoice

choice PRUNING
    prompt "Pruning"
    default PRUNING_NONE

config PRUNING_NONE
    bool "none"

config PRUNING_MOVEMENT
    bool "movement"
    depends on OPTIMIZER_ADAMW

endchoice

config N_LAYER
    int "Layers"
    range 1 8
    default 2

config RATE
    string "Rate"
    default "0.1"

config SEED
    int "Seed"
    default 1
"""


@dataclass(frozen=True)
class Named:
    hash8: str

    def identity(self):
        return {"name": self.hash8}


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Tree:
    root = tmp_path_factory.mktemp("kconfig")
    (root / "Kconfig").write_text(KCONFIG)
    return Tree(root)


def test_every_variant_is_trained_once_before_any_is_trained_again():
    variants = [Variant("a", number=0), Variant("b", number=1)]
    blocks = {s: [(v, Named(f"{v.slug}{s}")) for v in variants] for s in (3, 1)}
    runs = plan_runs("study", Path("results"), blocks)
    labels = [run.label for run in runs]
    assert labels == ["study/00-a s3", "study/01-b s3", "study/00-a s1", "study/01-b s1"]
    assert runs[0].path == Path("results/study/a-s3-a3")


def test_another_configuration_is_another_directory():
    one, other = (
        plan_runs("study", Path("results"), {1: [(Variant("a"), Named(name))]})[0].path
        for name in ("aaaaaaaa", "bbbbbbbb")
    )
    assert one != other


def test_two_names_for_one_run_are_refused():
    block = [(Variant("a"), Named("same")), (Variant("b"), Named("same"))]
    with pytest.raises(ConfigError, match="study/b s1 is the same run as study/a s1"):
        plan_runs("study", Path("results"), {1: block})


@pytest.mark.parametrize("pattern", ["a-b", "7", "study/07-a-b", "study/*", "a-*", "a-b-s1-*"])
def test_a_pattern_names_a_run_in_several_ways(pattern):
    (run,) = plan_runs("study", Path("results"), {1: [(Variant("a-b", number=7), Named("f"))]})
    assert run.matches(pattern)
    assert not run.matches("a") and not run.matches("17")


@pytest.mark.parametrize(
    ("text", "expected"), [("1", (1,)), ("1,2 5", (1, 2, 5)), ("2-4", (2, 3, 4)), ("", ())]
)
def test_seeds(text, expected):
    assert parse_seeds(text) == expected


@pytest.mark.parametrize("text", ["x", "1,-2", "3-1", "1,1", "1-3,2", "1.5", "1-9999999999"])
def test_bad_seeds_are_refused(text):
    with pytest.raises(ConfigError):
        parse_seeds(text)


def test_a_matrix_is_the_cross_product_without_what_kconfig_forbids(tree):
    matrix = plan_matrix(tree, [], "OPTIMIZER=adamw,spam PRUNING=none,movement")
    assert [v.slug for v in matrix.variants] == ["adamw-none", "adamw-movement", "spam-none"]
    assert matrix.variants[1].delta == {"OPTIMIZER_ADAMW": True, "PRUNING_MOVEMENT": True}
    (left_out,) = matrix.left_out
    assert str(left_out).startswith("spam-movement: ")
    assert "needs OPTIMIZER_ADAMW=y" in str(left_out)


def test_an_axis_may_be_any_symbol(tree):
    matrix = plan_matrix(tree, [], "N_LAYER=1,2 RATE=3e-4,0.1")
    slugs = [variant.slug for variant in matrix.variants]
    assert slugs[:2] == ["n-layer-1-rate-3e-4", "n-layer-1-rate-0.1"]
    assert len(slugs) == 4


def test_a_value_that_fits_nowhere_is_an_error_not_an_omission(tree):
    with pytest.raises(ConfigError, match="N_LAYER=9: .*out of range"):
        plan_matrix(tree, [], "N_LAYER=2,9 PRUNING=none,movement")
    base = Layer.of("config", ".config", {"OPTIMIZER_SPAM": True})
    with pytest.raises(ConfigError, match="PRUNING_MOVEMENT=y: .*OPTIMIZER_ADAMW"):
        plan_matrix(tree, [base], "PRUNING=none,movement")


@pytest.mark.parametrize(
    ("axes", "message"),
    [
        ("", "names no axis"),
        ("N_LAYER", "is not NAME=value"),
        ("N_LAYER=1,,2", "is not NAME=value"),
        ("NO_SUCH=1", "no such symbol or choice"),
        ("OPTIMIZER=adamw,sgd", "'sgd' is not one of adamw, spam"),
        ("N_LAYER=1 N_LAYER=2", "N_LAYER stands twice"),
        ("N_LAYER=1,1", "n-layer-1 stands twice"),
        ("SEED=1,2", "make SEEDS=1,2,3"),
    ],
)
def test_a_bad_matrix_is_refused(tree, axes, message):
    with pytest.raises(ConfigError, match=message):
        plan_matrix(tree, [], axes)
