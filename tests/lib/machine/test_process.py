"""The launcher's variables."""

import pytest

from lib.errors import PreflightError
from lib.machine.process import Process, current_process, missing_variables


def test_without_a_launcher_there_is_one_process() -> None:
    assert current_process({}) == Process(rank=0, world_size=1, local_rank=0)
    assert current_process({}).is_main


def test_a_launcher_says_which_one_this_is() -> None:
    found = current_process({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert found == Process(rank=5, world_size=8, local_rank=1)
    assert not found.is_main


def test_a_rank_that_is_no_number_is_named() -> None:
    with pytest.raises(PreflightError, match="RANK='zero'"):
        current_process({"RANK": "zero"})


def test_missing_and_differing_variables_are_listed() -> None:
    wanted = {"A": "1", "B": "2", "C": "3"}
    assert missing_variables(wanted, {"A": "1", "B": "0"}) == ["B=2", "C=3"]
