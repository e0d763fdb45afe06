"""Environment variables exported by make are the defaults of command-line options."""

from pathlib import Path

import pytest

from gpt2.planning.arguments import (
    add_running,
    add_selection,
    add_submit,
    asked_plan,
    new_parser,
    whole_number,
)
from lib.errors import ConfigError
from tests.build_folder import write_build


@pytest.fixture
def seeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that plans runs with environment variables and returns the seeds."""
    symbols = {"SINGLE_TRAINING": True, "DEVICE_CPU": True, "TOKENIZER_BYTE": True}
    write_build(tmp_path, symbols)
    for name in ("SEED", "SEEDS", "QUANT", "GPUS", "SET"):
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
    assert seeds(SEED="", SEEDS="2,3") == [2, 3]


@pytest.mark.parametrize("seed", ["-1", "1.5", "x", "1-3", "auto"])
def test_an_invalid_seed_is_located_at_its_variable(seeds, seed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        seeds(SEED=seed)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("usage.invalid-seed", "SEED")
    assert seed in problem.what


@pytest.mark.parametrize("variable", ["SEED", "SEEDS"])
def test_a_seed_out_of_range_is_one_error(seeds, variable: str) -> None:
    with pytest.raises(ConfigError) as caught:
        seeds(**{variable: "4294967296"})
    assert caught.value.codes == ["config.out-of-range"]
    assert "4294967296" in str(caught.value.problems[0])


def test_one_seed_and_several_conflict(seeds) -> None:
    with pytest.raises(ConfigError) as caught:
        seeds(SEED="7", SEEDS="2,3")
    assert caught.value.codes == ["usage.conflict"]


@pytest.mark.parametrize("settings", ["", "DROPOUT=0.1"])
def test_an_invalid_number_of_gpus_is_located_at_its_variable(seeds, settings: str) -> None:
    with pytest.raises(ConfigError) as caught:
        seeds(GPUS="0", SET=settings)
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("config.out-of-range", "GPUS")


def test_training_is_not_quantized(seeds) -> None:
    assert seeds(QUANT="none") == [1]
    with pytest.raises(ConfigError) as caught:
        seeds(QUANT="nf4")
    assert "make evaluate" in caught.value.problems[0].next


@pytest.mark.parametrize("text", ["-1", "1.5", "x", "", "１２", "012", "²"])
def test_an_invalid_number_is_located_at_its_variable(text: str) -> None:
    assert whole_number("12", "JOBS") == 12
    with pytest.raises(ConfigError) as caught:
        whole_number(text, "JOBS")
    (problem,) = caught.value.problems
    assert (problem.code, problem.where) == ("usage.invalid-number", "JOBS")


def test_samples_require_a_sweep(seeds) -> None:
    with pytest.raises(ConfigError) as caught:
        seeds(SAMPLES="3")
    assert caught.value.codes == ["usage.missing-argument"]


@pytest.mark.parametrize("words", [["--stpes", "3"], ["--steps"], ["more"]])
def test_an_invalid_option_is_an_error_of_the_product(words: list[str]) -> None:
    parser = new_parser("a test")
    add_selection(parser)
    with pytest.raises(ConfigError) as caught:
        parser.parse_args(words)
    assert caught.value.codes == ["usage.invalid-argument"]
    assert caught.value.exit_code == 2


def test_a_worker_gets_the_options_of_the_command_that_starts_it(monkeypatch) -> None:
    parser = new_parser("a test")
    add_selection(parser)
    add_running(parser)
    monkeypatch.setattr("sys.argv", ["slurm.py", "--steps", "0-3", "--allow-dirty"])
    monkeypatch.setenv("SEEDS", "1-5")
    given = parser.parse()
    monkeypatch.delenv("SEEDS")
    words = parser.words(given, without=("build_dir",))
    assert vars(parser.parse_args(words)) == vars(given)


@pytest.mark.parametrize(
    ("text", "is_set"), [("1", True), ("YES", True), ("no", False), ("", False)]
)
def test_a_switch_is_yes_or_no(monkeypatch, text: str, is_set: bool) -> None:
    monkeypatch.setenv("SUBMIT", text)
    parser = new_parser("a test")
    add_submit(parser)
    assert parser.parse_args([]).submit is is_set


def test_another_word_for_a_switch_is_an_error(monkeypatch) -> None:
    monkeypatch.setenv("SUBMIT", "maybe")
    with pytest.raises(ConfigError) as caught:
        add_submit(new_parser("a test"))
    assert caught.value.codes == ["usage.invalid-value"]
