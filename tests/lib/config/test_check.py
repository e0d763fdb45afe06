"""Tests of strictness: an assignment takes effect or is an error with its file and line."""

import pytest

from lib.config.layers import ConfigLayer, parse_command_line_settings, parse_text
from lib.config.tree import KconfigTree
from tests.errors import error_of

# Settings of one line each, the last of which is refused; error code without its area, other words.
INVALID = [
    ("N_LAYERS=4", "unknown-symbol", [" N_LAYER"]),
    ("ZZZZZZZ=4", "unknown-symbol", []),
    ("OPTIMIZER=y", "not-settable", ["OPTIMIZER_ADAMW, OPTIMIZER_ADAMWSPAM"]),
    ("LATENT_DIM=64", "unmet-dependency", ["PROJECTION_LATENT=y"]),
    (
        "KERNEL_FLASH=y",
        "unmet-dependency",
        ["DROPOUT || DEEP", "DEEP=n, DROPOUT=n", "DEVICE_CUDA=y"],
    ),
    ("N_LAYER=49", "out-of-range", ["1 to 48"]),
    ("N_LAYER=-1", "out-of-range", ["1 to 48"]),
    ("N_KV_HEAD=13", "out-of-range", ["1 to N_HEAD (12)"]),
    *((f"N_LAYER={value}", "wrong-type", ["integer"]) for value in ("y", "n", "1_0")),
    ('N_LAYER="4"', "wrong-type", ["integer", "quotes"]),
    *((f"DROPOUT={value}", "wrong-type", ["y or n"]) for value in ("1", "m")),
    ("LEARNING_RATE=6e-4", "wrong-type", ['CONFIG_LEARNING_RATE="6e-4"']),
    ("DEEP=y", "not-settable", ["Kconfig:31"]),
    ("OPTIMIZER_ADAMW=n", "conflict", ["choice OPTIMIZER"]),
    # Another value than in a line before, which may be repeated, and two members of a choice.
    ("N_LAYER=4 N_LAYER=4 N_LAYER=5", "duplicate", ["4 at f:2"]),
    ("PROJECTION_DENSE=y PROJECTION_LATENT=y", "conflict", ["PROJECTION_DENSE=y at f:2"]),
]


@pytest.mark.parametrize(("settings", "code", "parts"), INVALID)
def test_an_assignment_without_effect_is_an_error(refused, settings, code, parts):
    words = settings.split()
    (problem,) = refused("\n".join(["# first line", *(f"CONFIG_{word}" for word in words)]))
    assert (problem.where, problem.code) == (f"f:{1 + len(words)}", f"config.{code}")
    parts = [f"{words[-1].replace(chr(34), '')}: ", *parts]
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
