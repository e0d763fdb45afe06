"""The benchmark times the documented work. No test asserts a speed."""

import json

from gpt2.ablation.resolve import resolve_config
from gpt2.bench import trainer_worker
from gpt2.bench.trainer import CASES, TrainerComparison, case_config, to_markdown
from gpt2.planning.plan import config_layers, make_plan
from lib.config.dotconfig import defconfig_layers
from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.optim.options import OPTIMIZERS
from lib.project import ROOT
from tests.lib.terminal import unaligned


def test_both_sides_take_the_steps_that_were_asked_for(build):
    folder = build().path
    config = make_plan(config_layers(folder), folder).base
    for side in (trainer_worker.time_trainer, trainer_worker.time_plain_loop):
        seconds = side(config, folder, 2)
        assert len(seconds) == 2 and all(s > 0 for s in seconds)


def test_cases_differ_from_a_plain_loop_in_nothing_but_the_trainer():
    for spec, settings, _ in CASES.values():
        config = case_config(spec, settings, 2)
        assert config.optimizer.name == "adamw" and config.pruning.name == "none"
        assert config.machine.cpu_threads == 2 and config.model.attention.terms == ()
    assert case_config(*CASES["124m-bf16"][:2], 1).machine.precision == "bf16"
    assert case_config(*CASES["124m-fp32"][:2], 1).model.num_params() == 124_475_904


def test_mechanisms_are_the_study_s_distinct_models():
    found = trainer_worker.distinct_configs(64)
    assert next(iter(found)) == "baseline" and "pruned-50" not in found
    assert len({json.dumps(c.identity()["model"]) for c in found.values()}) == len(found) == 18


def test_table_gives_medians_and_the_spread_of_the_ratio():
    text = to_markdown(
        [TrainerComparison("x", 1200.0, 1000.0, 1100.0, (1.1, 1.3, 1.2), (1.0, 1.2, 1.1))],
        {"256": {"ra": {"forward": [1.4, 1.5, 1.7], "backward": [1.25]}}},
        {
            "torch fused AdamW": {"seconds": [0.5, 0.4, 0.5], "state_bytes": 2**30},
            "sgd": {"seconds": [0.25, 0.16, 0.3], "state_bytes": 2**29},
        },
    )
    text = unaligned(text)
    assert "| x | 1,200 | 1,000 | 1,100 | 1.20 (1.10 to 1.30) | 1.10 (1.00 to 1.20) |" in text
    assert "| torch fused AdamW | 500 | 1.00 (1.00 to 1.00) | 1.0 GiB | 1.00 |" in text
    assert "| sgd | 250 | 0.50 (0.40 to 0.60) | 0.5 GiB | 0.50 |" in text
    assert "| ra | 1.50 (1.40 to 1.70) | 1.25 (1.25 to 1.25) |" in text


def test_every_optimizer_is_timed_with_its_state(monkeypatch):
    small = {"MODEL_SIZE_CUSTOM": True, "N_LAYER": 1, "N_HEAD": 2, "N_EMBD": 96, "BLOCK_SIZE": 16}
    small |= {"TOKENIZER_BYTE": True}
    right = trainer_worker.case_config
    monkeypatch.setattr(
        trainer_worker,
        "case_config",
        lambda spec, settings, threads: right(spec, {**settings, **small}, threads),
    )
    found = trainer_worker.time_optimizers(1, 2)
    assert list(found) == ["torch fused AdamW", *OPTIMIZERS]
    assert all(len(figures["seconds"]) == 2 for figures in found.values())
    layers = [*defconfig_layers(ROOT, "gpt2-124m+cpu"), ConfigLayer.of("test", "test", small)]
    parameters = resolve_config(KconfigTree(), layers).model.num_params()
    state = {name: round(figures["state_bytes"] / parameters) for name, figures in found.items()}
    # Two moments of four bytes, AMSGrad's maximum as a third, momentum alone; masks are one byte
    # for the weights of matrices, which are most of this model.
    assert (state["adamw"], state["adamwadv"], state["sgd"]) == (8, 12, 4)
    assert state["torch fused AdamW"] == 8 and state["adamwprune"] == 9
