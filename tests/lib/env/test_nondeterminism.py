"""Non-deterministic operations are recorded by name; other warnings are printed."""

import warnings
from dataclasses import replace

import pytest
import torch

from lib.env.machine import set_up
from lib.env.observe import NondeterministicOperations, record_nondeterminism
from lib.env.ranks import ProcessRank
from tests.lib.env.conftest import CPU

WARN = replace(CPU, deterministic="warn")


def test_each_operation_is_noted_once():
    """Such as put_ without accumulation, whose result is undefined for duplicate indices."""
    set_up(WARN, ProcessRank())
    for _ in range(2):
        # torch and Python emit some warnings once; a second run in the process must record them too.
        said = []
        with record_nondeterminism(WARN, said.append) as met, warnings.catch_warnings():
            for _ in range(2):
                torch.zeros(3).put_(torch.tensor([0]), torch.tensor([1.0]))
        assert met.names == said == ["put_"]


def test_other_warnings_are_shown_as_before_and_nothing_is_noted_unless_the_setting_is_warn():
    recording = record_nondeterminism(WARN, lambda name: None)
    with pytest.warns(UserWarning, match="something else"), recording as met:
        warnings.warn("something else", stacklevel=1)
    assert met.names == []
    with record_nondeterminism(CPU, lambda name: None) as met:
        assert met is None


@pytest.mark.parametrize(
    ("message", "names"),
    [
        ("Flash Attention defaults to a non-deterministic algorithm. To", ["Flash Attention"]),
        (
            "Deterministic behavior was enabled with either `torch.x(True)` or `at::x(true)`, but "
            "this operation is not deterministic because it uses CuBLAS and you have CUDA >= 10.2.",
            ["CuBLAS"],
        ),
        ("cumsum_cuda does not have a deterministic implementation, but", ["cumsum_cuda"]),
        ("a deterministic implementation was taken", []),
    ],
)
def test_the_words_of_operations_on_gpus_are_known(message, names):
    """Messages are copied from torch's sources."""
    met = NondeterministicOperations(lambda name: None)
    assert met.meet(message) == bool(names) and met.names == names
