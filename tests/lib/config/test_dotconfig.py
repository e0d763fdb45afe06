"""Tests of the files of a configuration: .config, its origins, config.py, defconfigs."""

import os

import pytest

from lib.config.dotconfig import (
    ConfigWorkspace,
    defconfig_layers,
    explicit_settings,
    list_defconfigs,
    read_config,
    read_constants,
    resolve_config,
    write_constants,
)
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from tests.errors import error_of
from tests.lib.config.conftest import FIXTURE

HOSTILE = [
    "$(shell touch pwned)",
    "${HOME} $$ $HOME",
    "`touch pwned`; rm -rf /",
    "quote \" and ' and ''' and \"\"\"",
    'back\\slash \\n \\\\ \\" end\\',
    "naïve 漢字 🙂 \u00a0 \u202e",
    " # not a comment ",
    "tab\there",
    "{0} %s \\x41 __import__('os')",
    "",
]


def write(tree, config, *layers):
    resolution = tree.resolve(layers)
    tree.write_config(resolution, config)
    return resolution


@pytest.fixture
def generated(tree, tmp_path):
    """Return a function that writes .config and config.py of settings."""

    def generate(**settings):
        place = ConfigWorkspace(FIXTURE, tmp_path)
        layer = ConfigLayer.of("step", "s", settings)
        write_constants(write(tree, place.config, layer), place)
        return place

    return generate


def refused_constants(place):
    """Return the one problem of reading the folder's config.py."""
    (problem,) = error_of(read_constants, place).problems
    return problem


@pytest.mark.parametrize("value", HOSTILE)
def test_a_value_survives_every_file_unchanged(tree, generated, tmp_path, value):
    place = generated(OUTPUT_DIR=value)
    resolution = resolve_config(tree, place.config)
    assert resolution.values["OUTPUT_DIR"] == value
    assert read_constants(place) == resolution.values
    assert tree.resolve([place.layer]).values == resolution.values
    minimal = tree.minimal(resolution.layers)
    (tmp_path / "again").write_text(minimal, encoding="utf-8")
    assert tree.resolve([read_config(tmp_path / "again")]).values["OUTPUT_DIR"] == value


def test_config_is_canonical_and_keeps_the_one_before(tree, root, tmp_path):
    config = tmp_path / ".config"
    write(tree, config, *defconfig_layers(root, "base"))
    first = config.read_text()
    assert "\n# CONFIG_PROJECTION_DENSE is not set\nCONFIG_PROJECTION_LATENT=y\n" in first
    assert not (tmp_path / ".config.old").exists()
    os.utime(config, (1, 1))
    write(tree, config, read_config(config))
    assert config.stat().st_mtime == 1 and not (tmp_path / ".config.old").exists()
    write(tree, config, *defconfig_layers(root, "plain"))
    assert (tmp_path / ".config.old").read_text() == first
    names = [".config", ".config.old", ".config.origins"]
    assert sorted(path.name for path in tmp_path.iterdir()) == names


def origins(resolution):
    found = resolution.origins.items()
    return {name: (origin.where, origin.label) for name, origin in found if origin}


def test_origins_survive_in_the_sidecar(tree, root, tmp_path):
    config = tmp_path / ".config"
    written = write(tree, config, *defconfig_layers(root, "base+quick", "N_HEAD=8"))
    assert origins(resolve_config(KconfigTree(root), config)) == origins(written)
    assert origins(written)["N_LAYER"] == ("defconfigs/+quick:3", "fragment")
    assert origins(written)["LATENT_DIM"] == ("defconfigs/base:6", "defconfig")
    assert origins(written)["RUN_MODE"] == ("defconfigs/base:4", "defconfig")
    assert origins(written)["N_HEAD"] == ("SET", "command line")
    assert "N_KV_HEAD" not in origins(written)
    step = ConfigLayer.of("step", "step golden", {"N_LAYER": 6, "PROJECTION_DENSE": True})
    on_top = origins(resolve_config(tree, config, step))
    assert on_top["N_LAYER"] == on_top["PROJECTION"] == ("step golden", "step")
    assert on_top["N_HEAD"] == ("SET", "command line")


def test_a_line_edited_by_hand_is_told_apart(tree, root, tmp_path):
    config = tmp_path / ".config"
    write(tree, config, *defconfig_layers(root, "base"))
    lines = config.read_text().replace("CONFIG_N_HEAD=12", "CONFIG_N_HEAD=6").split("\n")
    config.write_text("\n".join(lines))
    edited = (f"{config}:{lines.index('CONFIG_N_HEAD=6') + 1}", "edited")
    found = resolve_config(tree, config)
    assert origins(found)["N_HEAD"] == edited
    assert origins(found)["LATENT_DIM"] == ("defconfigs/base:6", "defconfig")
    tree.write_config(found, config)
    assert origins(resolve_config(tree, config))["N_HEAD"] == edited


def test_a_default_that_has_changed_since_is_no_default(root, tree, tmp_path):
    kconfig = 'config A\n\tint "a"\n\trange 0 9\n\tdefault 1\n'
    (tmp_path / "Kconfig").write_text(kconfig)
    config = tmp_path / ".config"
    write(KconfigTree(tmp_path), config)
    assert origins(resolve_config(KconfigTree(tmp_path), config)) == {}
    (tmp_path / "Kconfig").write_text(kconfig.replace("default 1", "default 2"))
    assert origins(resolve_config(KconfigTree(tmp_path), config)) == {
        "A": ("Kconfig:1", "former default")
    }


@pytest.mark.parametrize("text", ["{", "[]", '{"origins": {"A": 1}}'])
def test_a_damaged_sidecar_is_named(tree, tmp_path, text):
    write(tree, tmp_path / ".config")
    (tmp_path / ".config.origins").write_text(text)
    (problem,) = error_of(resolve_config, tree, tmp_path / ".config").problems
    path = str(tmp_path / ".config.origins")
    assert (problem.code, problem.where, problem.next) == ("config.damaged", path, f"rm {path}")


def test_missing_files_name_the_commands(tree, generated):
    place = generated()
    place.config_py.unlink()
    problem = refused_constants(place)
    assert (problem.code, problem.where) == ("config.missing", str(place.config_py))
    assert problem.next == f"type: make O={place.build} {place.config_py}"
    place.config.unlink()
    (resolved,) = error_of(resolve_config, tree, place.config).problems
    for problem in (refused_constants(place), resolved):
        assert (problem.code, problem.where) == ("config.missing", str(place.config))
        assert "make defconfig-NAME" in problem.next and "make menuconfig" in problem.next


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("N_LAYER = 12", "N_LAYER = 6"),
        ("N_LAYER = 12", "N_LAYER = __import__('os').abort()"),
        ("N_LAYER = 12\n", "N_LAYER = (\n"),
        ("N_LAYER = 12\n", ""),
        ("N_LAYER = 12\n", "N_LAYER = 12\x00\n"),
        ("# SHA-256 ", "# SHA "),
    ],
)
def test_edited_constants(generated, old, new):
    place = generated()
    text = place.config_py.read_text()
    assert text.count(old) == 1
    place.config_py.write_text(text.replace(old, new))
    problem = refused_constants(place)
    assert (problem.code, problem.where) == ("config.edited", str(place.config_py))
    assert str(place.config) in problem.what and f"rm {place.config_py}; make" in problem.next


def test_stale_constants(generated):
    place = generated()
    text = place.config.read_text()
    place.config.write_text(text.replace("CONFIG_N_LAYER=12", "CONFIG_N_LAYER=6"))
    problem = refused_constants(place)
    assert (problem.code, problem.where) == ("config.stale", str(place.config_py))
    # The content counts, not the time.
    place.config.write_text(text)
    os.utime(place.config, (0, 0))
    assert read_constants(place)["N_LAYER"] == 12


def test_defconfigs_are_listed_with_their_first_comment(root):
    bases, fragments = list_defconfigs(root)
    assert [(d.name, d.summary, d.bases) for d in bases] == [
        ("base", "A study with latent attention", ()),
        ("plain", "All defaults", ()),
    ]
    assert [(d.name, d.summary, d.bases) for d in fragments] == [
        ("cpu", "Train without a GPU", ("*",)),
        ("quick", "Small and short", ("base", "plain")),
    ]


@pytest.mark.parametrize(
    ("spec", "kind", "name", "hint"),
    [
        ("bass", "defconfig", "'bass'", " base"),
        ("base+quack", "fragment", "'quack'", " quick"),
        ("quick", "defconfig", "'quick'", "make defconfig-NAME+quick"),
        ("base+plain", "fragment", "'plain'", "make defconfig-plain"),
        ("../defconfigs/base", "defconfig", "'../defconfigs/base'", ""),
    ],
)
def test_an_unknown_defconfig_names_the_nearest(root, spec, kind, name, hint):
    (problem,) = error_of(defconfig_layers, root, spec).problems
    assert problem.code == f"config.unknown-{kind}" and "make list-defconfigs" in problem.next
    assert name in problem.what and problem.what.endswith(hint)


def test_each_value_that_is_no_default_has_its_source(tree, root, tmp_path):
    config = tmp_path / ".config"
    write(tree, config, *defconfig_layers(root, "base+quick", "N_HEAD=7"))
    text = config.read_text().replace("CONFIG_LATENT_DIM=64\n", "CONFIG_LATENT_DIM=32\n")
    config.write_text(text)
    values = dict(tree.resolve([read_config(config)]).values)
    planned = {"N_LAYER": 5, "OUTPUT_DIR": "x"}
    found = explicit_settings(config, values | planned, "demo/run s7")
    sources = {name: (s["value"], s["label"], s["where"]) for name, s in found.items()}
    assert sources["N_HEAD"] == (7, "command line", "SET")
    assert sources["PROJECTION"] == ("latent", "defconfig", "defconfigs/base:5")
    assert sources["LATENT_DIM"] == (32, "edited", ".config")
    assert sources["N_LAYER"] == (5, "plan", "demo/run s7")
    assert sources["OUTPUT_DIR"] == ("x", "plan", "demo/run s7")
    assert sources["OPTIMIZER"][1:] == ("fragment", "defconfigs/+quick:4")
    dense = explicit_settings(config, values | {"PROJECTION": "dense"}, "x")["PROJECTION"]
    assert dense == {"value": "dense", "label": "plan", "where": "x"}
