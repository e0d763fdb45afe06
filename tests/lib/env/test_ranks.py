"""Rank and world size from the environment of a launcher."""

from pathlib import Path

import pytest

from lib.env.ranks import ProcessRank, current_process, missing_variables, rank_environment
from lib.errors import PreflightError


def test_without_a_launcher_there_is_one_process() -> None:
    assert current_process({}) == ProcessRank(rank=0, world_size=1, local_rank=0)
    assert current_process({}).is_main


def test_a_launcher_says_which_one_this_is() -> None:
    found = current_process({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert found == ProcessRank(rank=5, world_size=8, local_rank=1)
    assert not found.is_main


def test_a_rank_that_is_no_number_is_named() -> None:
    with pytest.raises(PreflightError) as caught:
        current_process({"RANK": "zero"})
    assert caught.value.codes == ["env.invalid-variable"]
    assert "RANK='zero'" in str(caught.value)


def test_missing_and_differing_variables_are_listed() -> None:
    wanted = {"A": "1", "B": "2", "C": "3"}
    assert missing_variables(wanted, {"A": "1", "B": "0"}) == ["B=2", "C=3"]


def test_processes_of_one_machine_meet_at_a_file(tmp_path: Path) -> None:
    found = current_process(rank_environment(1, 4, tmp_path / "meeting"))
    assert (found.rank, found.world_size, found.local_rank) == (1, 4, 1)
    assert found.rendezvous == f"file://{tmp_path}/meeting"
    # torchrun sets variables that torch reads.
    assert current_process({"WORLD_SIZE": "4"}).rendezvous == "env://"
