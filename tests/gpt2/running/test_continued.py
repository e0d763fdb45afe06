"""The copy of a half-trained run that goes on in another number of processes."""

from pathlib import Path

import pytest

from gpt2.records.files import write_resolved_config
from gpt2.running.continued import continue_half_trained
from gpt2.study.plan import Plan, config_layers, make_plan
from lib.errors import ConfigError, RunError
from lib.runs.run_dir import RunDir, RunStatus, State, write_status
from tests.build_folder import write_build
from tests.integration.conftest import SINGLE, SMALL


def planned(folder: Path, gpus: int) -> Plan:
    settings = {**SMALL, **SINGLE, "GPUS": gpus, "GRAD_ACCUMULATION": 2 // gpus}
    write_build(folder, {name: value for name, value in settings.items() if value is not None})
    return make_plan(config_layers(folder), folder)


@pytest.mark.parametrize("name", ["checkpoints", "checkpoints/step-00000002/state.pt", "logs.txt"])
def test_a_link_in_the_folder_of_a_run_is_not_followed(tmp_path, name):
    (begun,) = planned(tmp_path / "build", 1).runs
    source = RunDir(begun.path)
    source.checkpoint(2).mkdir(parents=True)
    write_resolved_config(source, begun.config)
    write_status(source, RunStatus(State.INTERRUPTED, iteration=2))
    for file in (source.logs, source.checkpoint(2) / "state.pt"):
        file.write_text("of the run")
    plan = planned(tmp_path / "build", 2)
    (secret := tmp_path / "secret").mkdir()
    (secret / "step-00000002").mkdir()
    place = source.path / name
    place.rename(tmp_path / "aside")
    place.symlink_to(secret)
    with pytest.raises(RunError) as caught:
        continue_half_trained(plan.runs, plan.folder)
    assert caught.value.codes == ["file.symbolic-link"]
    assert str(place) in str(caught.value) and [*plan.folder.iterdir()] == [source.path]
    place.unlink()
    (tmp_path / "aside").rename(place)
    continue_half_trained(plan.runs, plan.folder)
    assert RunDir(plan.runs[0].path).logs.read_text() == "of the run"


def test_without_a_half_trained_run_there_is_nothing_to_continue(tmp_path):
    plan = planned(tmp_path / "build", 2)
    with pytest.raises(ConfigError) as caught:
        continue_half_trained(plan.runs, plan.folder)
    assert caught.value.codes == ["run.none-to-continue"] and not plan.folder.exists()
