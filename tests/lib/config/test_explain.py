"""Tests of the explanation of a symbol: value, origin, dependencies, and an assignment on trial."""

from lib.config.dotconfig import defconfig_layers
from lib.config.explain import explain_value, format_explanation
from tests.errors import error_of


def test_a_symbol(tree, root):
    found = tree.resolve(defconfig_layers(root, "base+quick"))
    assert format_explanation(explain_value(tree, found, "N_LAYER")).split("\n") == [
        "N_LAYER = 4",
        "    from     defconfigs/+quick:3 (fragment)  N_LAYER=4",
        "    prompt   Layers",
        "    type     int, 1 to 48",
        "    default  12",
        "    defined  Kconfig:3",
        "",
        "    Number of blocks.",
        "",
    ]


def test_a_default_with_needs_a_trial_and_a_choice(tree, root):
    found = tree.resolve(defconfig_layers(root, "base"))
    explanation = explain_value(tree, found, "CONFIG_LATENT_SHARED=y")
    assert explanation["asked"]["assignment"] == "LATENT_SHARED=y"
    assert len(explanation["asked"]["problems"]) == 1
    text = format_explanation(explanation)
    assert text.startswith("LATENT_SHARED = n (not available)\n")
    assert "    from     parts/latent/Kconfig:14 (default)\n" in text
    assert "    needs    PROJECTION_LATENT=y  (met: PROJECTION_LATENT is y)\n" in text
    assert "    needs    DROPOUT=n  (unmet: DROPOUT is y)\n" in text
    assert "DROPOUT=n" in text.splitlines()[-1]
    taken = explain_value(tree, found, "N_HEAD=8")
    assert taken["asked"] == {"assignment": "N_HEAD=8", "problems": []}
    # The trial leaves the tree as it was.
    assert taken["value"] == 12 and "N_HEAD=8" in format_explanation(taken).splitlines()[-1]
    text = format_explanation(explain_value(tree, found, "PROJECTION"))
    assert text.startswith("PROJECTION = latent\n    from     defconfigs/base:5 (defconfig)")
    assert "    member   PROJECTION_LATENT  latent (MLA)  (selected)\n" in text
    member = explain_value(tree, found, "PROJECTION_DENSE")
    assert (member["value"], member["choice"]) == (False, "PROJECTION")
    origin = {"label": "defconfig", "where": "defconfigs/base:5"}
    assert member["origin"] == {**origin, "assignment": "PROJECTION_LATENT=y"}


def test_an_unknown_symbol(tree):
    (problem,) = error_of(explain_value, tree, tree.resolve([]), "OUTPUT_DIRS").problems
    assert problem.code == "config.unknown-symbol"
    assert problem.what.startswith("OUTPUT_DIRS: ") and problem.what.endswith(" OUTPUT_DIR")
