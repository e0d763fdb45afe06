"""Tests of strictness: an assignment takes effect or is an error with its file and line."""

import pytest

from lib.config.layers import ConfigLayer, parse_command_line_settings, parse_text
from lib.config.tree import KconfigTree
from tests.errors import error_of

# Line, error code without its area, parts of the message.
INVALID = [
    ("CONFIG_N_LAYERS=4", "unknown-symbol", ["N_LAYERS=4: ", " N_LAYER"]),
    ("CONFIG_ZZZZZZZ=4", "unknown-symbol", ["ZZZZZZZ=4: "]),
    (
        "CONFIG_OPTIMIZER=y",
        "not-settable",
        ["OPTIMIZER=y: ", "OPTIMIZER_ADAMW, OPTIMIZER_ADAMWSPAM"],
    ),
    ("CONFIG_LATENT_DIM=64", "unmet-dependency", ["LATENT_DIM=64: ", "PROJECTION_LATENT=y"]),
    (
        "CONFIG_KERNEL_FLASH=y",
        "unmet-dependency",
        ["KERNEL_FLASH=y: ", "DROPOUT || DEEP", "DEEP=n, DROPOUT=n", "DEVICE_CUDA=y"],
    ),
    ("CONFIG_N_LAYER=49", "out-of-range", ["N_LAYER=49: ", "1 to 48"]),
    ("CONFIG_N_LAYER=-1", "out-of-range", ["N_LAYER=-1: ", "1 to 48"]),
    ("CONFIG_N_KV_HEAD=13", "out-of-range", ["N_KV_HEAD=13: ", "1 to N_HEAD (12)"]),
    ("CONFIG_N_LAYER=y", "wrong-type", ["N_LAYER=y: ", "integer"]),
    ("CONFIG_N_LAYER=1_0", "wrong-type", ["N_LAYER=1_0: ", "integer"]),
    ("# CONFIG_N_LAYER is not set", "wrong-type", ["N_LAYER=n: ", "integer"]),
    ('CONFIG_N_LAYER="4"', "wrong-type", ["N_LAYER=4: ", "integer", "quotes"]),
    ("CONFIG_DROPOUT=1", "wrong-type", ["DROPOUT=1: ", "y or n"]),
    ("CONFIG_DROPOUT=m", "wrong-type", ["DROPOUT=m: ", "y or n"]),
    (
        "CONFIG_LEARNING_RATE=6e-4",
        "wrong-type",
        ["LEARNING_RATE=6e-4: ", 'CONFIG_LEARNING_RATE="6e-4"'],
    ),
    ("CONFIG_DEEP=y", "not-settable", ["DEEP=y: ", "Kconfig:31"]),
    ("CONFIG_OPTIMIZER_ADAMW=n", "conflict", ["OPTIMIZER_ADAMW=n: ", "choice OPTIMIZER"]),
    # Another value than in a line before, which may be repeated, and two members of a choice.
    (
        "CONFIG_N_LAYER=4\nCONFIG_N_LAYER=4\nCONFIG_N_LAYER=5",
        *("duplicate", ["N_LAYER=5: ", "4 at f:2"]),
    ),
    (
        "CONFIG_PROJECTION_DENSE=y\nCONFIG_PROJECTION_LATENT=y",
        *("conflict", ["PROJECTION_LATENT=y: ", "PROJECTION: PROJECTION_DENSE=y at f:2"]),
    ),
]


@pytest.mark.parametrize(("line", "code", "parts"), INVALID)
def test_an_assignment_without_effect_is_an_error(refused, line, code, parts):
    (problem,) = refused(f"# first line\n{line}\n")
    assert (problem.where, problem.code) == (f"f:{2 + line.count(chr(10))}", f"config.{code}")
    assert problem.what.startswith(parts[0]) and all(part in problem.what for part in parts)


def test_all_problems_of_all_layers_are_listed_at_once(refused):
    fragment = parse_text("CONFIG_X = 1\nCONFIG_N_LAYER=0\n", "fragment", "g")
    found = refused(
        "CONFIG_DROPOUT=maybe\nCONFIG_LATENT_DIM=1\n",
        fragment,
        parse_command_line_settings("NO_HEAD=2"),
    )
    assert [problem.where for problem in found] == ["g:1", "f:1", "f:2", "g:2", "SET"]


@pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\x85", "\u2028", "\udcff"])
def test_a_value_cannot_break_out_of_its_line(refused, character):
    layer = ConfigLayer.of("step", "step x", {"OUTPUT_DIR": f"a{character}CONFIG_DROPOUT=y"})
    (problem,) = refused(layer)
    assert (problem.where, problem.code) == ("step x", "config.invalid-character")
    assert problem.what.startswith("OUTPUT_DIR=a") and repr(character) in problem.what


def test_a_failed_override_does_not_blame_what_it_overrides(refused):
    (problem,) = refused("CONFIG_N_LAYER=8\n", parse_command_line_settings("N_LAYER=99"))
    assert (problem.where, problem.code) == ("SET", "config.out-of-range")
    assert problem.what.startswith("N_LAYER=99: ")
    kernel = "CONFIG_DEVICE_CUDA=y\nCONFIG_KERNEL_AUTO=y\n"
    (problem,) = refused(kernel, parse_command_line_settings("KERNEL_FLASH=y"))
    assert (problem.where, problem.code) == ("SET", "config.unmet-dependency")
    assert problem.what.startswith("KERNEL_FLASH=y: ") and "DROPOUT || DEEP" in problem.what


def test_a_failed_member_does_not_blame_the_one_it_overrides(tmp_path):
    """With C unavailable the choice falls back on its default A, which is not B's fault."""
    (tmp_path / "Kconfig").write_text(
        'config GPU\n\tbool "gpu"\n\nchoice X\n\tprompt "x"\n\nconfig A\n\tbool "a"\n\n'
        'config B\n\tbool "b"\n\nconfig C\n\tbool "c"\n\tdepends on GPU\n\nendchoice\n'
    )
    (problem,) = error_of(
        KconfigTree(tmp_path).resolve,
        [parse_text("CONFIG_B=y", "defconfig", "f"), parse_command_line_settings("C=y")],
    ).problems
    assert (problem.where, problem.code) == ("SET", "config.unmet-dependency")
    assert problem.what.startswith("C=y: ") and "GPU=y" in problem.what


def test_a_later_layer_may_not_push_an_earlier_value_out_of_its_range(refused):
    """kconfiglib would silently fall back to the default."""
    (problem,) = refused("CONFIG_N_KV_HEAD=8\n", parse_command_line_settings("N_HEAD=4"))
    assert (problem.where, problem.code) == ("f:1", "config.out-of-range")
    assert problem.what.startswith("N_KV_HEAD=8: ")
    assert problem.what.endswith("(expected 1 to N_HEAD (4), got 8)")


def test_forced_by_a_select(tmp_path):
    text = 'config A\n\tbool "a"\n\tselect B\n\nconfig B\n\tbool "b"\n'
    (tmp_path / "Kconfig").write_text(text)
    (problem,) = error_of(
        KconfigTree(tmp_path).resolve,
        [parse_text("CONFIG_A=y\n# CONFIG_B is not set\n", "defconfig", "f")],
    ).problems
    assert (problem.where, problem.code) == ("f:2", "config.conflict")
    assert problem.what.startswith("B=n: ") and problem.what.endswith(" by A")


def test_setting_n_what_is_n_anyway_is_fine(tree):
    resolution = tree.resolve([parse_text("# CONFIG_LATENT_SHARED is not set", "fragment", "f")])
    assert resolution.values["LATENT_SHARED"] is False
    # It is n because it is not available, not because of that line.
    assert resolution.origins["LATENT_SHARED"] is None
