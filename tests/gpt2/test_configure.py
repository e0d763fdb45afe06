"""Tests of the commands that configure: output, written files, errors."""

import json
from collections.abc import Callable

import pytest

from gpt2 import configure
from lib.config.dotconfig import ConfigWorkspace, read_constants, resolve_config
from lib.config.tree import KconfigTree
from lib.kablate import call
from lib.project import ROOT
from tests.errors import error_of
from tests.lib.terminal import Terminal

Run = Callable[..., str]


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in a build folder and returns its output and log."""
    monkeypatch.delenv("KCONFIG_CONFIG", raising=False)

    def command(name, *words):
        capsys.readouterr()
        assert call(name, ["-O", str(tmp_path), *words]) == 0
        shown = capsys.readouterr()
        return shown.out + shown.err

    return command


@pytest.fixture
def place(tmp_path):
    return ConfigWorkspace(ROOT, tmp_path)


def files(place):
    return {path.name: path.read_bytes() for path in place.build.iterdir()}


def test_defconfig_then_constants(run, place):
    text = '$(shell id) `id` "é"'
    log = run("defconfig", "gpt2-ratio-ablation+cpu", "--set", f"OUTPUT_DIR='{text}' SEED=2")
    assert f"gpt2-ratio-ablation+cpu -> {place.config} (" in log
    content = place.config_py.read_bytes()
    assert ", 0 new or changed since the last write)" in run("constants")
    assert place.config_py.read_bytes() == content
    values = read_constants(place)
    assert (values["OUTPUT_DIR"], values["SEED"], values["DEVICE"]) == (text, 2, "cpu")
    assert ", 2 new or changed" in run("defconfig", "gpt2-ratio-ablation+cpu")


def test_a_bad_value_leaves_the_configuration_alone(run, place):
    run("defconfig", "gpt2-quickstart")
    before = files(place)
    words = ["-O", str(place.build), "gpt2-124m", "--set", "JOBBS=1 LOG_INTERVAL=-1"]
    unknown, out_of_range = error_of(call, "defconfig", words).problems
    assert (unknown.where, unknown.code) == ("SET", "config.unknown-symbol")
    assert "JOBS" in unknown.what and "make menuconfig" in unknown.next
    assert (out_of_range.where, out_of_range.code) == ("SET", "config.out-of-range")
    assert "make why SYM=LOG_INTERVAL" in out_of_range.next
    with place.config_py.open("a") as file:
        file.write("N_LAYER = 3\n")
    edited = files(place)
    assert error_of(call, "defconfig", words[:3]).codes == ["config.edited"]
    assert before == {**edited, "config.py": before["config.py"]} and files(place) == edited


def test_olddefconfig_updates_what_constants_refuse(run, place):
    run("defconfig", "gpt2-ratio-ablation")
    place.config_py.unlink()
    lines = place.config.read_text().replace("CONFIG_DEVICE_CUDA=y", "CONFIG_DEVICE_CPU=y")
    lines = lines.replace("# CONFIG_DEVICE_CPU is not set", "# CONFIG_DEVICE_CUDA is not set")
    place.config.write_text(lines.replace("CONFIG_SEED=1\n", "") + "CONFIG_NO_SUCH=1\n")
    error = error_of(call, "constants", ["-O", str(place.build)])
    assert set(error.codes) >= {"config.unmet-dependency", "config.unknown-symbol"}
    assert all("make olddefconfig" in problem.next for problem in error.problems)
    assert not place.config_py.exists()
    log = run("olddefconfig")
    assert "WARN    dropped" in log and "NO_SUCH=1: no such symbol" in log
    assert f"{len(error.problems)} dropped, 1 new: SEED" in log
    assert "config.py" in run("constants") and read_constants(place)["DEVICE"] == "cpu"
    place.config.write_text(place.config.read_text().replace("CONFIG_SEED=1\n", ""))
    assert "new symbol, at the default: SEED\n" in run("constants")


def test_savedefconfig_returns_the_lines_of_the_defconfig(run, place):
    # Without a configuration, olddefconfig takes the defaults.
    run("olddefconfig")
    run("constants")
    assert read_constants(place)["N_LAYER"] == 12
    run("defconfig", "gpt2-quickstart")
    run("savedefconfig")
    source = (ROOT / "defconfigs/gpt2-quickstart").read_text().splitlines()
    saved = (place.build / "defconfig").read_text().splitlines()
    assert sorted(saved) == sorted(line for line in source if line.startswith("CONFIG"))
    log = run("defconfig", "gpt2-quickstart", "--set", "SINGLE_TRAINING=y")
    assert "has no effect with the settings on top: ABLATION_STUDY_QUICKSTART=y: needs" in log


def test_list_defconfigs(run, monkeypatch):
    text = run("list-defconfigs")
    assert "\n  gpt2-quickstart " in text and "[any]\n" in text
    monkeypatch.setattr(configure, "terminal_columns", lambda stream: 80)
    narrow = run("list-defconfigs")
    assert max(map(len, narrow.splitlines())) <= 80 < max(map(len, text.splitlines()))
    document = json.loads(run("list-defconfigs", "--json"))
    assert document["schema_version"] == 1
    assert {f["name"]: f["bases"] for f in document["fragments"]}["env-venv"] == ["*"]


def test_why(run, place):
    run("defconfig", "gpt2-quickstart")
    assert "\n    from     defconfigs/gpt2-quickstart:" in run("why", "VERDICT_BAND")
    step = run("why", "POSITIONS", "--steps", "rope", "--set", "LOG_INTERVAL=2")
    assert step.startswith("POSITIONS = rope\n    from     step quickstart/01-rope (step)")
    found = json.loads(run("why", "SEED=3", "--json"))
    assert found["asked"]["problems"] == [] and found["schema_version"] == 1
    words = ["-O", str(place.build)]
    two = error_of(call, "why", [*words, "N_LAYER", "--steps", "0,1"])
    assert two.codes == ["usage.invalid-value"]
    assert error_of(call, "why", words).codes == ["usage.missing-argument"]


def test_menuconfig_saves_a_change_with_its_origin(run, place):
    run("defconfig", "gpt2-quickstart")
    before = place.config.read_bytes()
    words = ["-m", "lib.kablate", "menuconfig", "-O", str(place.build)]
    terminal = Terminal(words, LINES="30", COLUMNS="90")
    for keys, shown in (
        *(("", "Jump to symbol"), ("/", "Type text"), ("LOG_INTERVAL", "Iterations between")),
        *(("\n", "[Q] Quit"), ("\n", "Range"), ("\x7f\x7f\x7f7\nq", "Save configuration?")),
        ("y", "Configuration saved to"),
    ):
        terminal.press(keys, shown)
    assert terminal.finish() == 0
    found = resolve_config(KconfigTree(), place.config)
    origins = {name: origin.label for name, origin in found.origins.items() if origin}
    assert found.values["LOG_INTERVAL"] == 7 and origins["LOG_INTERVAL"] == "edited"
    assert origins["VERDICT_BAND"] == "defconfig" and "SEED" not in origins
    assert place.config.with_name(".config.old").read_bytes() == before


def test_menuconfig_needs_a_terminal_and_an_edit_that_keeps_the_rules(run, place, monkeypatch):
    assert error_of(call, "menuconfig", ["-O", str(place.build)]).codes == ["usage.no-terminal"]
    assert not files(place)
    run("defconfig", "gpt2-quickstart")
    text = place.config.read_text().replace("CONFIG_GLOBAL_BATCH=", "CONFIG_GLOBAL_BATCH=9")
    monkeypatch.setattr(configure, "_edit", lambda tree, path: path.write_text(text))
    (problem,) = error_of(call, "menuconfig", ["-O", str(place.build)]).problems
    assert problem.what.startswith("GLOBAL_BATCH: BATCH_SIZE=") and ".config:" in problem.where
