"""What commands are told by make's variables."""

from pathlib import Path

import pytest

from gpt2.arguments import add_selection, asked_plan, new_parser
from lib.errors import ConfigError
from lib.kconfig import Layer, Tree


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The seeds of the runs that are planned under the variables given."""
    symbols = {"SINGLE_TRAINING": True, "DEVICE_CPU": True, "TOKENIZER_BYTE": True}
    Tree().write_config([Layer.of("defconfig", "test", symbols)], tmp_path / ".config")
    for name in ("SEED", "SEEDS", "QUANT"):
        monkeypatch.delenv(name, raising=False)

    def planned(**variables: str) -> list[int]:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        parser = new_parser("a test")
        add_selection(parser)
        _, plan = asked_plan(parser.parse_args(["-O", str(tmp_path)]))
        return [run.seed for run in plan.runs]

    return planned


def test_one_seed_or_several(seeds) -> None:
    assert seeds() == [1]
    assert seeds(SEED="4294967295") == [4294967295]
    assert seeds(SEED="7", SEEDS="2,3") == [2, 3]


@pytest.mark.parametrize("seed", ["-1", "4294967296", "1.5", "x"])
def test_a_seed_that_is_none_is_one_error(seeds, seed: str) -> None:
    with pytest.raises(ConfigError, match="SEEDS") as caught:
        seeds(SEED=seed)
    assert len(caught.value.problems) == 1 and seed in str(caught.value)


def test_training_is_not_quantized(seeds) -> None:
    assert seeds(QUANT="none") == [1]
    with pytest.raises(ConfigError, match="make evaluate RUN=NAME QUANT=int8"):
        seeds(QUANT="nf4")
