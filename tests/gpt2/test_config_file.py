"""A .config with lines that kconfiglib would ignore or change is rejected."""

from pathlib import Path

import pytest

from gpt2.planning.plan import config_layers, make_plan
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.errors import ConfigError

# Line → what is said of it, and what the symbol would be in silence.
WRONG = {
    "CONFIG_N_KV_HEAD=2": ("N_KV_HEAD=2: needs ATTENTION_PROJECTION_GROUPED=y", "have no value"),
    "CONFIG_N_HEAD=0": ("N_HEAD=0: out of range 1 to 128", "be 12"),
    "CONFIG_NO_SUCH=y": ("NO_SUCH=y: no such symbol", ""),
    "CONFIG_SEED = 5": ("spaces around '='; write CONFIG_SEED=5", "be 1"),
    "CONFIG_SEED=5 # five": ("CONFIG_SEED: comment after a value", "be 1"),
    "CONFIG_SEED=five": ("SEED=five: wrong type, SEED is int", "be 1"),
    "CONFIG_PRECISION_BF16=y": ("PRECISION_BF16=y: second member of the choice", "be fp32"),
    "CONFIG_MAX_ITERS=7": ("MAX_ITERS=7: duplicate with another value: 100 at ", "be 100"),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A build folder whose .config leaves out what the wrong lines set, but for two symbols."""
    small = {"DEVICE_CPU": True, "MODEL_SIZE_CUSTOM": True, "MAX_ITERS": 100}
    KconfigTree().write_config([ConfigLayer.of("defconfig", "test", small)], tmp_path / ".config")
    kept = ("SEED", "N_HEAD", "PRECISION_BF16")
    lines = (tmp_path / ".config").read_text().splitlines(keepends=True)
    left = [
        line for line in lines if not any(f"CONFIG_{name}" in line.split("=")[0] for name in kept)
    ]
    (tmp_path / ".config").write_text("".join(left))
    return tmp_path


def refusal(folder: Path, lines: str) -> ConfigError:
    """What is said of ``lines`` at the end of .config, which stays as it is."""
    path = folder / ".config"
    path.write_text(path.read_text() + lines)
    before = path.read_bytes()
    with pytest.raises(ConfigError) as caught:
        make_plan(config_layers(folder), folder)
    assert caught.value.exit_code == 2 and path.read_bytes() == before
    assert [p.name for p in folder.iterdir() if not p.name.startswith(".config")] == []
    return caught.value


@pytest.mark.parametrize("line", WRONG)
def test_a_line_that_would_not_count_is_named_with_what_would(folder: Path, line: str) -> None:
    said, value = WRONG[line]
    number = len((folder / ".config").read_text().splitlines()) + 1
    problems = refusal(folder, f"{line}\n").problems
    found = [p for p in problems if p.where.endswith(f".config:{number}")]
    assert len(found) == 1 and said in found[0].what, problems
    assert value in found[0].next and (" would " in found[0].next) == bool(value)


def test_all_of_them_are_told_at_once(folder: Path) -> None:
    text = str(refusal(folder, "".join(f"{line}\n" for line in WRONG if "SEED=" not in line)))
    for line, (said, _) in WRONG.items():
        assert "SEED=" in line or said in text
