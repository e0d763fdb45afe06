"""A .config below the settings of commands, steps and sweeps; an edited or stale config.py."""

import pytest

from gpt2.study.plan import config_layers, make_plan
from gpt2.study.resolve import resolve_config
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer, parse_command_line_settings, to_kconfig_text
from lib.config.tree import KconfigTree
from lib.kablate import call
from lib.project import ROOT
from tests.build_folder import write_build
from tests.errors import error_of


@pytest.fixture
def folder(tmp_path):
    """Return a configured build folder."""
    settings = {"DEVICE_CPU": True, "MODEL_SIZE_CUSTOM": True, "MAX_ITERS": 100}
    return write_build(tmp_path, settings)


@pytest.mark.parametrize(("file", "code"), [("config.py", "edited"), (".config", "stale")])
def test_every_command_refuses_an_edited_or_stale_config_py(folder, file, code):
    path = folder / file
    text = path.read_text()
    changed = text.replace("MAX_ITERS = 100\n", "MAX_ITERS = 101\n")
    path.write_text(changed.replace("CONFIG_MAX_ITERS=100\n", "CONFIG_MAX_ITERS=101\n"))
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for command in ("plan", "status", "all", "check", "data"):
        error = error_of(call, command, ["-O", str(folder)])
        (problem,) = error.problems
        assert (problem.code, problem.where) == (f"config.{code}", f"{folder}/config.py")
        assert f"make O={folder} {folder}/config.py" in problem.next and error.exit_code == 2
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_problem_of_a_step_is_located_at_the_line_of_config(tmp_path):
    settings = {"DEVICE_CPU": True, "MODEL_SIZE_CUSTOM": True, "N_EMBD": 96, "N_HEAD": 4}
    write_build(tmp_path, {**settings, "N_HEAD": 5})
    line = (tmp_path / ".config").read_text().split("\n").index("CONFIG_N_EMBD=96") + 1
    (problem,) = error_of(make_plan, config_layers(tmp_path), tmp_path).problems
    assert (problem.code, problem.where) == ("config.not-divisible", f"{tmp_path}/.config:{line}")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return the build folder of a defconfig with an explicit default, a precision."""
    folder = tmp_path_factory.mktemp("loaded")
    explicit = parse_command_line_settings("MATMUL_PRECISION_HIGHEST=y")
    write_build(folder, {}, *defconfig_layers(ROOT, "gpt2-ratio-small"), explicit)
    return folder


@pytest.mark.parametrize(
    ("settings", "name", "before", "after"),
    [
        ("DROPOUT=0.1", "ATTENTION_BACKEND", "flash", "rows"),
        ("DROPOUT=0.1 ATTENTION_BACKEND_MATH=y", "ATTENTION_BACKEND", "flash", "math"),
        ("RUN_PROFILE_MAXOUT_SPEED=y", "MATMUL_PRECISION", "highest", "highest"),
    ],
)
def test_settings_on_a_config_are_those_on_its_defconfig(loaded, settings, name, before, after):
    tree, layer = KconfigTree(), parse_command_line_settings(settings)
    base = config_layers(loaded)
    assert resolve_config(tree, base).values[name] == before
    found = resolve_config(tree, [*base, layer])
    given = defconfig_layers(ROOT, "gpt2-ratio-small", f"{settings} MATMUL_PRECISION_HIGHEST=y")
    assert found.values[name] == after
    assert found.identity() == resolve_config(tree, given).identity()
    # A step changes no default of the configuration.
    step = ConfigLayer.of("step", "s", {"DROPOUT": "0.0"})
    on_top = resolve_config(tree, [*base, layer, step])
    assert (on_top.values["DROPOUT"], on_top.values[name]) == ("0.0", after)


@pytest.mark.parametrize("on_top", ["", "DROPOUT=0.1"])
@pytest.mark.parametrize("axes", ["DROPOUT=0.0,0.1", "RUN_PROFILE=maxout_speed"])
def test_a_point_of_a_sweep_is_the_training_with_set(loaded, axes, on_top):
    tree, layers = KconfigTree(), config_layers(loaded)
    top = parse_command_line_settings(on_top)
    plan = make_plan([*layers, top], loaded, sweep=axes)
    for run in plan.runs:
        assert run.variant.delta is not None
        point = {name: to_kconfig_text(value) for name, value in run.variant.delta.items()}
        given = dict(word.split("=") for word in on_top.split())
        words = {**given, **point, "SINGLE_TRAINING": "y"}
        typed = parse_command_line_settings([f"{name}={value}" for name, value in words.items()])
        assert run.config.identity() == resolve_config(tree, [*layers, typed]).identity()
