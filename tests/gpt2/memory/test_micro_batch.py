"""BATCH_SIZE=0: one micro-batch for all runs of a plan, predicted once per build folder."""

import pytest

from gpt2.check.cases import plan_cases
from gpt2.memory import micro_batch, predict
from gpt2.study.plan import config_layers, make_plan
from lib.config.field import SymbolValue
from lib.env.gpu import GPUS
from lib.errors import ConfigError, PreflightError
from lib.json_files import DamagedRecord
from tests.build_folder import write_build

BASE: dict[str, SymbolValue] = {
    "DEVICE_CPU": True,
    "MODEL_SIZE_TINY": True,
    "TOKENIZER_BYTE": True,
    "RA_MLA_ABLATION_MODE": True,
    "RA_MLA_ABLATION_STEPS": "0-2",
    "GLOBAL_BATCH": 24,
    "BATCH_SIZE": 0,
}


@pytest.fixture
def machine(monkeypatch):
    """Return the limits of runs on this machine, by the name of the run; 24 for the others."""
    sizes: dict[str, int] = {}

    def predicted(configs):
        assert {config.train.batch_size for config in configs.values()} == {1}
        shares = [config.train.grad_accumulation for config in configs.values()]
        limits = {name: sizes.get(name, 24) for name in configs}
        return {"device": "card", "memory_gib": 80.0, "sizes": limits, "shares": shares}

    monkeypatch.setattr(micro_batch, "_predicted", predicted)
    return sizes


def planned(folder, steps="", sweep="", **settings):
    build = write_build(folder, {**BASE, **settings})
    return make_plan(config_layers(build), build, steps=steps, sweep=sweep)


def records(folder):
    """Return the stored micro-batches of the study, and what was left beside them."""
    return list((folder / "results/ratio").glob("*micro-batch*"))


def batches(plan):
    return [(r.config.train.batch_size, r.config.train.grad_accumulation) for r in plan.runs]


def test_the_largest_that_fits_every_run_is_the_one_of_all(machine, tmp_path):
    machine["ra"] = 10
    plan = planned(tmp_path)
    assert batches(plan) == [(8, 3)] * 3 and plan.base.train.batch_size == 8
    assert plan.runs[0].config.values["BATCH_SIZE"] == 8
    # Part of the identity: the runs are those of the same number, set by hand.
    by_hand = planned(tmp_path, BATCH_SIZE=8, GRAD_ACCUMULATION=3)
    assert [run.path for run in by_hand.runs] == [run.path for run in plan.runs]
    assert by_hand.micro_batch is None and plan.micro_batch.run == "ra"


@pytest.mark.slow
def test_a_plan_keeps_its_micro_batch_on_any_machine_and_for_any_selection(machine, tmp_path):
    first = planned(tmp_path)
    machine |= dict.fromkeys(("baseline", "golden"), 1)
    others = [{}, {"SEED_LIST": "4,5"}, {"LEARNING_RATE": "1e-4", "MAX_ITERS": 9}]
    for later in (*(planned(tmp_path, **settings) for settings in others), planned(tmp_path, "1")):
        assert set(batches(later)) == {(24, 1)} and later.micro_batch == first.micro_batch
    assert set(batches(planned(tmp_path, GLOBAL_BATCH=48))) == {(1, 48)}


def test_processes_and_sweeps_divide_the_sequences(machine, tmp_path):
    assert set(batches(planned(tmp_path, GPUS=2))) == {(12, 1)}
    assert batches(planned(tmp_path, sweep="GPUS=1,3")) == [(8, 3), (8, 1)]
    with pytest.raises(ConfigError) as caught:
        planned(tmp_path, sweep="BATCH_SIZE=0,8")
    assert caught.value.codes == ["config.conflict"]


def test_no_micro_batch_without_memory_or_a_readable_record(machine, tmp_path):
    machine["golden"] = 0
    with pytest.raises(PreflightError) as caught:
        planned(tmp_path)
    assert caught.value.codes == ["memory.too-small"] and not records(tmp_path)
    machine.clear()
    planned(tmp_path)
    (record,) = records(tmp_path)
    record.write_text("{")
    with pytest.raises(DamagedRecord):
        planned(tmp_path)


def test_check_tests_one_sequence(tmp_path):
    cases = plan_cases(config_layers(write_build(tmp_path, BASE)), build_dir=tmp_path)
    trains = [case.config.train for case in cases.chosen if case.config]
    assert [(t.batch_size, t.grad_accumulation) for t in trains] == [(1, 24)] * 3


def test_a_gpu_decides_if_there_is_one(configure, monkeypatch):
    config = configure(BATCH_SIZE=1, GRAD_ACCUMULATION=8, DEVICE_CUDA=True)
    monkeypatch.setattr(predict, "local_gpu", lambda: None)
    assert predict.micro_batch_limits({"run": config}) is None
    card, gib = GPUS["h100"], 2**30
    free = [60 * gib, 20 * gib, 59 * gib]
    monkeypatch.setattr(predict, "local_gpu", lambda: card)
    monkeypatch.setattr(predict.torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(predict.torch.cuda, "mem_get_info", lambda i: (free[i], 80 * gib))
    # The second card is in use. The context of this process is not free, and counted once.
    assert predict.free_memory(config).memory_gib == 60


@pytest.mark.slow
def test_this_machine_predicts_its_cpu(tmp_path, forked_modules):
    settings = {name: v for name, v in BASE.items() if not name.startswith("RA_MLA")}
    build = write_build(tmp_path, settings)
    plan = make_plan(config_layers(build), build)
    assert batches(plan) == [(24, 1)] and plan.micro_batch.device == "cpu"
