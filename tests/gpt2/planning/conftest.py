"""Plans of a small configuration."""

from collections.abc import Callable
from pathlib import Path

import pytest

from gpt2.planning.plan import Plan, Sweep, config_layers, make_plan
from lib.config.field import SymbolValue
from tests.build_folder import write_build

SMALL = {"DEVICE_CPU": True, "MODEL_SIZE_TINY": True, "TOKENIZER_BYTE": True, "MAX_ITERS": 100}


@pytest.fixture
def configure(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a .config and returns its build folder; None removes a symbol."""

    def write(**settings: SymbolValue | None) -> Path:
        symbols = {k: v for k, v in {**SMALL, **settings}.items() if v is not None}
        return write_build(tmp_path, symbols)

    return write


@pytest.fixture
def planned(configure) -> Callable[..., Plan]:
    def plan(
        steps: str = "", seeds: str = "", sweep: Sweep | None = None, **settings: SymbolValue | None
    ) -> Plan:
        build = configure(**settings)
        return make_plan(config_layers(build), build, steps=steps, seeds=seeds, sweep=sweep)

    return plan
