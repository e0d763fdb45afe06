"""Settings are changed one at a time and compared within rounds. No test asserts a speed."""

import pytest

from gpt2.bench import settings, settings_worker
from gpt2.bench.settings import BASE, SettingFigures
from gpt2.planning.plan import config_layers
from lib.config.tree import KconfigTree
from lib.errors import ConfigError, Problem, RunError
from tests.lib.terminal import unaligned


def test_each_arm_changes_one_setting_of_the_configuration(build):
    folder = build(DROPOUT="0.0").path
    every, left_out = settings.variants(KconfigTree(), config_layers(folder))
    base, *others = every
    changed = {
        a.name: {
            n
            for n, v in a.config.identity()["machine"].items()
            if v != vars(base.config.machine)[n]
        }
        for a in others
    }
    assert changed["DETERMINISTIC_OFF"] == {"deterministic"}
    assert changed["PRECISION_BF16"] == {"precision"}
    assert changed["MATMUL_PRECISION_MEDIUM"] == {"matmul_precision"}
    backends = [a.config.model.attention.backend for a in others if "BACKEND" in a.name]
    # The base has flash already.
    assert backends == ["auto", "math", "rows"]
    loader = [a for a in others if a.config.data != base.config.data]
    assert [a.name for a in loader][:2] == ["PIN_MEMORY=n", "LOADER_WORKERS=2"]
    (fp16,) = [p for p in left_out if p.what.startswith("PRECISION_FP16: ")]
    assert "DEVICE_CUDA" in fp16.what
    assert base.config.study.mode == "single_training"
    assert [
        a.name for a in settings.variants(KconfigTree(), config_layers(folder), "COMPILE")[0]
    ] == [
        BASE,
        "COMPILE",
    ]


def test_an_unknown_setting_is_refused(build):
    with pytest.raises(ConfigError) as caught:
        settings.variants(KconfigTree(), config_layers(build().path), "LEARNING_RATE COMPILE")
    assert caught.value.codes == ["config.unknown-symbol"]
    assert caught.value.problems[0].what.startswith("LEARNING_RATE:")


def test_debugging_symbols_are_refused(build, monkeypatch):
    layers = config_layers(build().path)
    # Any bool of the base can replace a debugging symbol.
    monkeypatch.setattr(settings, "_DEBUG_SYMBOLS", ("BIAS",))
    with pytest.raises(ConfigError) as caught:
        settings.variants(KconfigTree(), layers)
    assert caught.value.codes == ["config.conflict"]
    assert caught.value.problems[0].what.startswith("BIAS:")
    assert "SET=BIAS=n" in caught.value.problems[0].next


def test_the_arms_take_turns_and_a_failed_one_is_left_out(build):
    every = settings.variants(
        KconfigTree(), config_layers(build().path), "COMPILE,GRAD_CHECKPOINTING"
    )[0]
    order = []

    def train(one):
        order.append(one.name)
        if one.name == "COMPILE":
            raise RunError(Problem("no compiler", code="run.failed"))
        return SettingFigures(100.0 * len(order), 2**20, 2.5, one.name)

    found = settings.measure_settings(every, 3, train)
    assert order == [BASE, "COMPILE", "GRAD_CHECKPOINTING"] + [BASE, "GRAD_CHECKPOINTING"] * 2
    assert found.keys() == {BASE, "GRAD_CHECKPOINTING"}


def test_the_table_compares_within_rounds():
    base = [SettingFigures(s, 2**20, 2.5, "a") for s in (100.0, 200.0, 50.0)]
    other = [
        SettingFigures(s, 2**21, 2.25, w) for s, w in ((150.0, "b"), (200.0, "b"), (100.0, "b"))
    ]
    text = unaligned(settings.settings_to_markdown({BASE: base, "TWICE": other, "SAME": base}))
    assert "| base | 100 | 1.00 (1.00 to 1.00) | 1 | 2.5 | as the base |" in text
    assert "| TWICE | 150 | 1.50 (1.00 to 2.00) | 2 | 2.25 | other |" in text
    assert "| SAME | 100 | 1.00 (1.00 to 1.00) | 1 | 2.5 | as the base |" in text
    unsteady = [base[0], base[1], other[0]]
    last = settings.settings_to_markdown({BASE: base, "X": unsteady}).splitlines()[-1]
    cells = unaligned(last).split(" | ")
    assert cells[0] == "| X" and cells[-1] not in ("as the base |", "other |")


@pytest.mark.slow
@pytest.mark.usefixtures("torch_as_before")
def test_a_setting_without_an_effect_on_bits_leaves_the_weights_alone(build):
    """Train the base, with gradient checkpointing, and in bf16."""
    folder = build(DROPOUT="0.1").path
    asked = "GRAD_CHECKPOINTING,PRECISION_BF16"
    every = settings.variants(KconfigTree(), config_layers(folder), asked)[0]
    plain, half, again = (settings_worker.time_setting(one.config, folder, 1) for one in every)
    assert plain.weights == again.weights != half.weights
    assert plain.loss == again.loss and min(plain.tokens_per_second, plain.peak_bytes) > 0


def test_an_arm_is_a_process_of_its_own_and_says_why_it_cannot_train(build, forked_modules):
    folder = build()
    code, _, said = folder.command(
        "scripts/bench.py", "settings", "--rounds", "2", "--sym", "COMPILE"
    )
    assert code == 2 and "--rounds" in said and "[usage.out-of-range]" in said
    every = settings.variants(KconfigTree(), config_layers(folder.path), "ATTENTION_BACKEND_FLASH")[
        0
    ]
    # The CPU's flash attention does not support dropout.
    with pytest.raises(RunError) as caught:
        settings.train_variant(every[1], 1, folder.path)
    (problem,) = caught.value.problems
    assert problem.what.startswith("ATTENTION_BACKEND_FLASH: ATTENTION_BACKEND_FLASH: ")
    # The code of the error that the training process reported.
    assert problem.code and not problem.what.endswith("]")
