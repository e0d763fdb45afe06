"""Random configurations are legal and reproducible, and a failure is reduced to its cause."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch.nn.functional as F

from gpt2.check import CHECKS, random
from gpt2.check.cases import plan_cases
from gpt2.check.random import (
    RandomCheckRequest,
    RandomConfig,
    case_of,
    ddmin,
    draw_config,
    minimize,
    non_default_settings,
    reduce_settings,
    resolve_settings,
)
from gpt2.check.worker import run_in_process
from gpt2.config import Config
from gpt2.mlp.mlp import Mlp
from lib.config.layers import ConfigLayer, parse_text
from lib.config.tree import KconfigTree
from lib.errors import ConfigError
from lib.project import ROOT

SCRIPT = [str(ROOT / "scripts" / "check.py"), "random"]


@pytest.fixture(scope="module")
def tree() -> KconfigTree:
    return KconfigTree()


@pytest.fixture(scope="module")
def drawn(tree: KconfigTree) -> list[RandomConfig]:
    return [draw_config(tree, 1, number) for number in range(60)]


class TestDraw:
    def test_every_draw_is_legal_and_no_two_are_the_same(self, tree, drawn):
        for one in drawn:
            values = tree.resolve([ConfigLayer.of("defconfig", "test", one.settings)]).values
            assert Config.from_values(values) == one.config
        assert len({one.config.hash8 for one in drawn}) == len(drawn)

    def test_the_seed_and_the_number_decide(self, drawn):
        again = draw_config(KconfigTree(), 1, 7)
        assert again.settings == drawn[7].settings
        assert draw_config(KconfigTree(), 2, 7).settings != again.settings

    def test_every_mechanism_optimizer_and_pruner_is_drawn(self, tree, drawn):
        choices = (
            "OPTIMIZER",
            "PRUNING",
            "ATTENTION_PROJECTION",
            "ATTENTION_PATTERN",
            "MLP_SIZING",
        )
        for name in choices:
            members = {m.removeprefix(f"{name}_").lower() for m in self._members(tree, name)}
            # NSA's sizes must divide each other, which random values rarely do.
            members.discard("nsa")
            assert {str(one.config.values[name]) for one in drawn} - {"nsa"} == members
        for name in ("RECIPROCAL", "RA_CROSS_TOKEN", "MLP_ATTN_GATE", "MLP_CROSS_TOKEN", "BIAS"):
            assert {one.config.values[name] for one in drawn} == {True, False}

    @staticmethod
    def _members(tree: KconfigTree, name: str) -> tuple[str, ...]:
        (info,) = [s for s in tree.symbols() if s.name == name]
        return info.members

    def test_plans_and_free_text_stay_as_they_are(self, drawn):
        for one in drawn:
            values = one.config.values
            assert values["RUN_MODE"] == "single_training" and not values["DRY_RUN"]
            assert values["INIT_FROM"] == "" and values["DATA_DIR"] == "data"


class TestReduce:
    def test_the_result_is_minimal(self):
        names, tested = list("abcdefghijklmnop"), []

        def test(subset):
            tested.append(tuple(subset))
            return {"c", "k", "l"} <= set(subset)

        assert ddmin(names, test) == ["c", "k", "l"]
        assert len(set(tested)) == len(tested)

    def test_mutually_dependent_names_are_removed_together(self):
        """b without c, and c without b, are invalid."""

        def test(subset):
            return None if ("b" in subset) != ("c" in subset) else {"a", "e"} <= set(subset)

        assert ddmin(list("abcde"), test) == ["a", "e"]

    def test_a_failure_of_the_defaults_reduces_to_no_settings(self):
        assert ddmin(list("abc"), lambda subset: True) == []

    def test_a_setting_is_removed_with_its_dependency(self, tree, drawn):
        one = next(
            o for o in drawn if "RECIPROCAL_WINDOW" in non_default_settings(tree, o.settings)
        )
        left = minimize(tree, one.settings, lambda c: bool(c.values["RECIPROCAL"]))
        assert left == {"RECIPROCAL": "y"}

    @pytest.mark.usefixtures("torch_as_before")
    @pytest.mark.slow
    def test_a_fault_of_two_symbols_is_reduced_to_both(self, tree, drawn, monkeypatch, tmp_path):
        """Tokens read the row's mean, but only without biases and with the exact GELU."""
        right = Mlp.forward

        def forward(self, x, *rest):
            out, state = right(self, x, *rest)
            both = self.c_fc.bias is None and self.activation is F.gelu
            return (out + x.mean(1, keepdim=True) if both else out), state

        monkeypatch.setattr(Mlp, "forward", forward)
        one = next(
            o
            for o in drawn
            if not o.config.values["BIAS"] and o.config.values["ACTIVATION"] == "gelu_exact"
        )
        assert len(non_default_settings(tree, one.settings)) > 10
        found = run_in_process(case_of(one), [CHECKS["causal"]], {})
        assert found["causal"].state == "failed"
        left = reduce_settings(one.settings, "causal", tmp_path)
        assert left == {"BIAS": "n", "ACTIVATION_GELU_EXACT": "y"}
        text = tree.minimal([ConfigLayer.of("defconfig", "test", left)])
        (case,) = plan_cases([parse_text(text, "defconfig", "it")]).chosen
        assert case.config.identity() == resolve_settings(tree, left).identity()

    @pytest.mark.usefixtures("torch_as_before")
    @pytest.mark.slow
    def test_reduction_stops_at_the_time_limit(self, tree, drawn, monkeypatch, tmp_path):
        monkeypatch.setattr(random, "_TIME_LIMIT_SECONDS", -1.0)
        left = reduce_settings(drawn[0].settings, "causal", tmp_path)
        assert left.items() >= non_default_settings(tree, drawn[0].settings).items()


class TestCommand:
    def test_checks_and_counts(self, tmp_path, tmp_path_factory, server):
        (tmp_path / "randcheck-9.defconfig").touch()
        words = ["-O", str(tmp_path), "--count", "2", "--checks", "causal", "--seed", "3", "--json"]
        scratch = tmp_path_factory.mktemp("streams")
        code, out, said = server.run([*SCRIPT, *words], os.environ, scratch)
        assert code == 0, said
        record = json.loads(out)
        assert (record["configurations"], record["failures"], record["seed"]) == (2, [], 3)
        assert "2/2 configurations, 0 failed" in said
        assert list(tmp_path.iterdir()) == []

    def test_an_interrupt_ends_it_with_130(self, tmp_path, server):
        words = [*SCRIPT, "-O", str(tmp_path), "--count", "12", "--checks", "causal"]
        command = server.start(words, os.environ, tmp_path)
        while "\n" not in command.stderr:
            assert command.poll() is None
            time.sleep(0.01)
        assert "1/12 configurations, 0 failed, eta" in command.stderr.splitlines()[0]
        command.signal(signal.SIGINT)
        assert command.wait(30) == 130 and "Traceback" not in command.stderr
        assert command.stderr.splitlines()[-1].split() == ["EXIT", "code", "130"]

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (("--count", "0"), "[usage.invalid-value]"),
            (("--count", "many"), "'many'"),
            (("--seed", "x"), "'x'"),
            (("--checks", "causl"), "nearest: causal [usage.unknown-check]"),
        ],
    )
    def test_an_invalid_argument_is_reported(self, tmp_path, server, words, message):
        environment = {k: v for k, v in os.environ.items() if k not in ("COUNT", "SEED")}
        command = [*SCRIPT, "-O", str(tmp_path), *words]
        code, _, said = server.run(command, environment, tmp_path)
        assert (code, message in said) == (2, True), said


def test_a_request_requires_at_least_one_configuration():
    with pytest.raises(ConfigError) as caught:
        RandomCheckRequest(Path(), 0, 1)
    assert caught.value.codes == ["usage.invalid-value"]
    assert caught.value.problems[0].where == "COUNT"
