"""Rank and world size from the environment of a launcher."""

import pytest

from lib.env.ranks import ProcessRank, current_process, missing_variables, rank_environment
from lib.errors import PreflightError


def test_a_process_without_and_with_a_launcher(tmp_path):
    alone = current_process({})
    assert alone == ProcessRank(rank=0, world_size=1, local_rank=0) and alone.is_main
    found = current_process({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1"})
    assert found == ProcessRank(rank=5, world_size=8, local_rank=1) and not found.is_main
    # torchrun sets variables that torch reads; processes of one machine meet at a file.
    assert found.rendezvous == "env://"
    here = current_process(rank_environment(1, 4, tmp_path / "meeting"))
    assert here == ProcessRank(1, 4, 1, f"file://{tmp_path}/meeting")


def test_a_rank_that_is_not_a_number_is_named_and_missing_variables_are_listed():
    with pytest.raises(PreflightError, match="RANK='zero'") as caught:
        current_process({"RANK": "zero"})
    assert caught.value.codes == ["env.invalid-variable"]
    wanted = {"A": "1", "B": "2", "C": "3"}
    assert missing_variables(wanted, {"A": "1", "B": "0"}) == ["B=2", "C=3"]
