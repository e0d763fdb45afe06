"""Tests of resolved values, layers, origins, and the description of the tree."""

import pytest

from lib.config.layers import parse_command_line_settings, parse_text, with_locations
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem
from tests.errors import error_of


def defconfig(text, shown="f"):
    return parse_text(text, "defconfig", shown)


def test_values_are_typed_and_choices_are_words(tree):
    values = tree.resolve([defconfig("CONFIG_OPTIMIZER_ADAMWSPAM=y\nCONFIG_N_LAYER=30\n")]).values
    assert values == {
        "DEEP": True,
        "DEPTH_NAME": "deep",
        "DEVICE_CUDA": False,
        "DROPOUT": False,
        # A choice that is not available, and symbols that are not.
        "KERNEL": "",
        "LATENT_DIM": 0,
        "LATENT_SHARED": False,
        "LEARNING_RATE": "6e-4",
        "N_HEAD": 12,
        "N_KV_HEAD": 1,
        "N_LAYER": 30,
        "OPTIMIZER": "adamwspam",
        "OUTPUT_DIR": "results",
        "PROJECTION": "dense",
        "RUN_MODE": "single_training",
        "SPAM_INTERVAL": 1000,
        "STEPS": "",
    }
    assert values["DEEP"] is True and type(values["N_LAYER"]) is int


def test_later_layers_win(tree):
    layers = [
        defconfig("CONFIG_N_LAYER=4\nCONFIG_PROJECTION_LATENT=y\nCONFIG_N_HEAD=4\n", "base"),
        parse_text("CONFIG_N_LAYER=6\nCONFIG_PROJECTION_DENSE=y\n", "fragment", "frag"),
        parse_command_line_settings("N_LAYER=8"),
    ]
    found = tree.resolve(layers)
    assert (found.values["N_LAYER"], found.values["PROJECTION"]) == (8, "dense")
    where = {
        name: origin and (origin.where, origin.label) for name, origin in found.origins.items()
    }
    assert where["N_LAYER"] == ("SET", "command line")
    assert where["PROJECTION"] == ("frag:2", "fragment")
    assert where["N_HEAD"] == ("base:3", "defconfig")
    assert where["DROPOUT"] is None
    assert where.keys() == found.values.keys()


def test_an_assignment_that_a_later_layer_hides_is_reported(tree):
    base = defconfig("CONFIG_PROJECTION_LATENT=y\nCONFIG_LATENT_DIM=64\n")
    found = tree.resolve([base, parse_command_line_settings("PROJECTION_DENSE=y")])
    (problem,) = found.hidden
    assert (problem.where, problem.code) == ("f:2", "config.unmet-dependency")
    assert problem.what.startswith("LATENT_DIM=64: ") and "PROJECTION_LATENT=y" in problem.what
    assert found.origins["LATENT_DIM"] is None
    assert not tree.resolve([base]).hidden


def test_an_early_n_counts_when_a_later_layer_makes_its_symbol_available(tmp_path):
    (tmp_path / "Kconfig").write_text(
        'config GPU\n\tbool "g"\n\nconfig COMPILE\n\tbool "c"\n\tdepends on GPU\n\tdefault y\n'
    )
    tree = KconfigTree(tmp_path)
    layers = [defconfig("# CONFIG_COMPILE is not set"), parse_command_line_settings("GPU=y")]
    assert tree.resolve([*layers[1:]]).values["COMPILE"] is True
    assert tree.resolve(layers).values["COMPILE"] is False


def test_resolving_again_starts_from_the_defaults(tree):
    plain = tree.resolve([]).values
    tree.resolve([defconfig("CONFIG_N_LAYER=30\nCONFIG_OPTIMIZER_ADAMWSPAM=y\n")])
    with pytest.raises(ConfigError):
        tree.resolve([defconfig("CONFIG_N_HEAD=2\nCONFIG_N_KV_HEAD=9\nCONFIG_RUN_MODE=y\n")])
    assert tree.resolve([]).values == plain


def test_a_full_config_states_derived_values_which_must_be_right(tree, refused):
    full = parse_text(tree.config_text([]), "config", ".config")
    assert "DEPTH_NAME" in {assignment.name for assignment in full.assignments}
    found = tree.resolve([full, parse_command_line_settings("N_LAYER=30")])
    assert found.values["DEPTH_NAME"] == "deep" and found.origins["DEPTH_NAME"] is None
    text = tree.config_text([]).replace('"shallow"', '"deep"')
    (problem,) = refused(parse_text(text, "config", ".config"))
    assert problem.code == "config.not-settable" and problem.what.startswith("DEPTH_NAME=deep: ")
    assert "Kconfig:35" in problem.what and problem.what.endswith(" shallow")
    assert "make olddefconfig" in problem.next


def test_adapt_drops_what_no_longer_applies_and_nothing_else(tree, refused):
    text = tree.config_text([defconfig("CONFIG_PROJECTION_LATENT=y\nCONFIG_LATENT_DIM=64\n")])
    text = text.replace("CONFIG_PROJECTION_LATENT=y", "CONFIG_PROJECTION_GONE=y")
    adapted, dropped = tree.adapt(parse_text(text + "CONFIG_N_HEAD=0\n", "config", "c"))
    unknown, unmet = dropped
    assert unknown.code == "config.unknown-symbol"
    assert unknown.what.startswith("PROJECTION_GONE=y: ")
    assert unknown.what.endswith("PROJECTION, PROJECTION_DENSE, PROJECTION_LATENT")
    assert unmet.code == "config.unmet-dependency" and unmet.what.startswith("LATENT_DIM=64: ")
    (problem,) = refused(adapted)
    assert problem.code == "config.duplicate" and problem.what.startswith("N_HEAD=0: ")
    assert problem.what.endswith("12 at c:6")


def test_locate_points_at_the_line_that_set_the_value(tree):
    found = tree.resolve([defconfig('CONFIG_LEARNING_RATE="fast"\n')])
    problems = {
        "LEARNING_RATE: 'fast' is not a number": "f:1",
        # The rule of a default is located at a line that was set.
        "N_HEAD: too small for LEARNING_RATE=fast": "f:1",
        "OUTPUT_DIR: no": "",
        "other": "",
    }
    error = ConfigError(*(Problem(what, code="demo.rule") for what in problems))
    elsewhere = Problem("LEARNING_RATE: elsewhere", "g:9", code="config.conflict")
    located = with_locations(ConfigError(*error.problems, elsewhere), found)
    assert [problem.where for problem in located.problems] == [*problems.values(), "g:9"]
    assert located.codes == [*["demo.rule"] * 4, "config.conflict"]


def test_rule_problems_are_raised_with_failed_assignments(tree):
    """But not the rule about N_LAYER, because its value is not the requested one."""

    def rules(values):
        number = f"LEARNING_RATE: {values['LEARNING_RATE']} is no number"
        heads = f"N_HEAD: {values['N_HEAD']} does not go with N_LAYER={values['N_LAYER']}"
        raise ConfigError(
            Problem(number, code="config.wrong-type"), Problem(heads, code="config.conflict")
        )

    first, second = error_of(
        tree.checked, [defconfig('CONFIG_N_LAYER=0\nCONFIG_LEARNING_RATE="fast"\n')], rules
    ).problems
    assert (first.where, first.code) == ("f:1", "config.out-of-range")
    assert first.what.startswith("N_LAYER=0: ")
    assert str(second) == "f:2: LEARNING_RATE: fast is no number [config.wrong-type]"
    resolution, made = tree.checked([defconfig("CONFIG_N_LAYER=6\n")], len)
    assert made == len(resolution.values)


def test_asking_for_a_default_changes_nothing(tree):
    layer = defconfig("CONFIG_N_LAYER=4\nCONFIG_DROPOUT=y\nCONFIG_OPTIMIZER_ADAMWSPAM=y\n")
    text = tree.config_text([layer])
    items = {item.name: tree.default(item) for item in tree.items()}
    assert (items["N_LAYER"], items["DROPOUT"], items["OPTIMIZER"]) == ("12", "n", "adamw")
    assert tree.kconf.config_text() == text


def test_the_environment_cannot_change_the_tree(root, tree, monkeypatch, tmp_path):
    for name in ("hostile", "kconfigfunctions"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('ran code that no one asked for')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("srctree", "/nowhere")
    monkeypatch.setenv("CONFIG_", "OTHER_")
    monkeypatch.setenv("KCONFIG_FUNCTIONS", "hostile")
    monkeypatch.setenv("KCONFIG_CONFIG_HEADER", "CONFIG_N_LAYER=1\n")
    assert KconfigTree(root).config_text([]) == tree.config_text([])


@pytest.mark.parametrize(
    ("kconfig", "code", "part"),
    [
        ("config A\n\tbool\n\tdepends on NOBODY\n", "warning", "NOBODY"),
        ("config A\n\tboool\n", "syntax-error", "Kconfig:2"),
        ('source "absent"\n', "syntax-error", "absent"),
        (None, "unreadable", "Kconfig"),
    ],
)
def test_a_faulty_or_missing_tree_is_rejected(tmp_path, kconfig, code, part):
    if kconfig is not None:
        (tmp_path / "Kconfig").write_text(kconfig)
    error = error_of(KconfigTree, tmp_path)
    assert f"kconfig.{code}" in error.codes and part in str(error)
