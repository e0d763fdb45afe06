"""What is timed of steps; tests/integration/test_commands.py times them, and an evaluation."""

import pytest

from gpt2.running import probe
from gpt2.study.plan import config_layers, make_plan
from lib.config.field import SymbolValue
from lib.errors import PreflightError
from tests.build_folder import write_build

SMALL: dict[str, SymbolValue] = {
    "DEVICE_CPU": True,
    "SINGLE_TRAINING": True,
    "CPU_THREADS": 1,
    "MODEL_SIZE_CUSTOM": True,
    "N_LAYER": 2,
    "N_HEAD": 2,
    "N_EMBD": 32,
    "BLOCK_SIZE": 16,
    "TOKENIZER_BYTE": True,
    "GLOBAL_BATCH": 4,
    "BATCH_SIZE": 2,
    "GRAD_ACCUMULATION": 2,
    "EVAL_TOKENS": 512,
}


class FakeMachine:
    """Clock that only steps and evaluations advance."""

    def __init__(self, first: float, micro_batch: float, update: float) -> None:
        self.now, self.first, self.micro_batch, self.update = 0.0, first, micro_batch, update
        self.steps: list[int] = []

    def clock(self) -> float:
        return self.now

    def run(self, micro_batches: int) -> None:
        slow = 0.0 if self.steps else self.first
        self.now += slow + micro_batches * self.micro_batch + self.update
        self.steps.append(micro_batches)


@pytest.mark.parametrize(
    ("micro_batch", "count", "timed", "steps"),
    [
        # Whole steps, after two of one micro-batch; the first one is slow.
        (0.1, 8, 10, [1, 1, *[8] * 10]),
        # Ends after 20 s.
        (0.5, 8, 5, [1, 1, *[8] * 5]),
        # Whole steps take too long.
        (0.5, 64, 10, [1, 1, *[1, 2] * 10]),
        # At least one.
        (30.0, 2, 1, [1, 1, 2]),
        (30.0, 64, 1, [1, 1, 1, 2]),
    ],
)
def test_the_time_of_a_step_and_the_time_that_it_takes(micro_batch, count, timed, steps):
    machine = FakeMachine(50.0, micro_batch, update=0.2)
    seconds, number, parts = probe.step_seconds(machine.run, count, machine.clock)
    assert seconds == pytest.approx(count * micro_batch + 0.2) and number == timed
    assert machine.steps == steps and parts == max(steps)


def test_a_missing_device_is_an_error(tmp_path):
    folder = write_build(tmp_path, {**SMALL, "DEVICE_CPU": False, "DEVICE_CUDA": True})
    config = make_plan(config_layers(folder), folder).base
    with pytest.raises(PreflightError) as caught:
        probe.probe(config, folder)
    assert caught.value.codes[0].startswith("gpu.")
