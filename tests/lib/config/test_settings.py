"""Tests of the explicit settings stored in a run's directory."""

from pathlib import Path

from lib.config.dotconfig import defconfig_layers, explicit_settings, read_config
from lib.config.tree import KconfigTree


def test_each_value_that_is_no_default_has_its_source(
    tree: KconfigTree, root: Path, tmp_path
) -> None:
    config = tmp_path / ".config"
    tree.write_config(defconfig_layers(root, "base+quick", "N_HEAD=7"), config)
    values = dict(tree.resolve([read_config(config)]).values)
    found = explicit_settings(config, values, "demo/run s7")
    assert found["N_HEAD"] == {"value": 7, "label": "command line", "where": "SET"}
    latent = {"value": "latent", "label": "defconfig", "where": "defconfigs/base:5"}
    assert found["PROJECTION"] == latent
    labels = {setting["label"] for setting in found.values()}
    assert labels == {"defconfig", "fragment", "command line"}
    places = {s["where"].split(":")[0] for s in found.values() if s["label"] == "fragment"}
    assert places == {"defconfigs/fragments/quick"}
    assert len(found) < len(values)


def test_edits_and_planned_values_have_their_labels(
    tree: KconfigTree, root: Path, tmp_path
) -> None:
    config = tmp_path / ".config"
    tree.write_config(defconfig_layers(root, "base"), config)
    text = config.read_text()
    assert "CONFIG_N_HEAD=12\n" in text
    config.write_text(text.replace("CONFIG_N_HEAD=12\n", "CONFIG_N_HEAD=3\n"))
    values = dict(tree.resolve([read_config(config)]).values)
    edited = {"value": 3, "label": "edited", "where": ".config"}
    assert explicit_settings(config, values, "x")["N_HEAD"] == edited
    planned = {"value": 4, "label": "plan", "where": "x"}
    assert explicit_settings(config, values | {"N_HEAD": 4}, "x")["N_HEAD"] == planned
    planned = {"value": "dense", "label": "plan", "where": "x"}
    assert explicit_settings(config, values | {"PROJECTION": "dense"}, "x")["PROJECTION"] == planned
