"""Environment variables exported by make are the defaults of command-line options."""

import pytest

from gpt2.study.arguments import asked_plan
from lib import kablate
from tests.build_folder import write_build
from tests.errors import error_of
from tests.options import options


@pytest.fixture
def seeds(tmp_path, monkeypatch):
    """Return a function that plans runs with environment variables and returns the seeds."""
    write_build(tmp_path, {"SINGLE_TRAINING": True, "DEVICE_CPU": True, "TOKENIZER_BYTE": True})
    for name in ("SEED", "SEEDS", "GPUS", "SET"):
        monkeypatch.delenv(name, raising=False)

    def planned(**variables):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        return [run.seed for run in asked_plan(options("plan", "-O", str(tmp_path))).runs]

    return planned


def test_one_seed_or_several(seeds):
    assert seeds() == [1]
    assert seeds(SEED="4294967295") == [4294967295]
    assert seeds(SEED="", SEEDS="2,3") == [2, 3]


@pytest.mark.parametrize(
    ("variables", "code", "where"),
    [
        ({"SEED": "1-3"}, "usage.invalid-number", "SEED"),
        ({"SEED": "7", "SEEDS": "2,3"}, "usage.conflict", "SEED"),
        ({"GPUS": "0", "SET": "DROPOUT=0.1"}, "config.out-of-range", "GPUS"),
    ],
)
def test_an_invalid_value_is_located_at_its_variable(seeds, variables, code, where):
    (problem,) = error_of(seeds, **variables).problems
    assert (problem.code, problem.where) == (code, where)
    assert where == "GPUS" or "SEEDS=" in problem.next


@pytest.mark.parametrize("words", [["--stpes", "3"], ["--steps"], ["more"], ["--ste", "3"]])
def test_an_invalid_option_is_an_error_of_the_product(words):
    error = error_of(options, "plan", *words)
    assert error.codes == ["usage.invalid-argument"]
    assert error.exit_code == 2 and "kablate plan --help" in error.problems[0].next
    assert ("--steps" in error.problems[0].what) == (words != ["more"])


def test_a_worker_gets_the_options_of_the_command_that_starts_it(monkeypatch):
    monkeypatch.setenv("SEEDS", "1-5")
    monkeypatch.setenv("SUBMIT", "y")
    given = options("slurm", "--steps", "0-3", "--allow-dirty", "--keep-going=n", "--jobs", "0")
    monkeypatch.delenv("SEEDS")
    worker = vars(options("all", *kablate.option_words("all", given)))
    shared = worker.keys() & vars(given).keys()
    assert {"steps", "seeds", "keep_going", "jobs", "set", "sweep"} <= shared
    assert {name: worker[name] for name in shared} == {name: vars(given)[name] for name in shared}
    assert (worker["jobs"], worker["keep_going"], worker["allow_dirty"]) == (0, False, True)
