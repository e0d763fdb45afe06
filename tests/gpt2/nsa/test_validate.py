"""Machine validation: passes without faults, fails on faults, absent if a backend cannot run."""

import pytest
import torch

from gpt2.nsa import branches, module, validate
from gpt2.nsa.cache import NsaCache
from lib.errors import PreflightError, Problem

CPU = torch.device("cpu")


def states(monkeypatch, *names):
    """Return the rows of the named checks, on the blocks backend."""
    monkeypatch.setattr(validate, "BACKENDS", ("blocks",))
    rows = validate.validate_device(CPU, False)
    return {row["check"]: row for row in rows if row["check"] in names}


@pytest.mark.slow
def test_a_leak_and_a_wrong_decoding_step_fail(monkeypatch):
    right = branches.attend_window
    monkeypatch.setattr(
        branches, "attend_window", lambda q, k, v, w: right(q, k.roll(-1, 2), v.roll(-1, 2), w)
    )
    found = states(monkeypatch, "float64 reference", "1024 tokens")
    assert [row["state"] for row in found.values()] == ["FAIL"] * 2
    monkeypatch.undo()
    read = NsaCache._read
    monkeypatch.setattr(NsaCache, "_read", lambda self, *given: 1.01 * read(self, *given))
    assert states(monkeypatch, "1024 tokens")["1024 tokens"]["state"] == "FAIL"


@pytest.mark.slow
def test_a_wrong_gradient_and_wrong_half_precision_fail(monkeypatch):
    def frozen(gates, x_BTC):
        logits_BTX = gates.c_gate(x_BTC) + gates.bias.detach()
        return logits_BTX.unflatten(-1, (3, -1)).permute(2, 0, 3, 1).sigmoid()

    monkeypatch.setattr(module.BranchGates, "forward", frozen)
    found = states(monkeypatch, "float64 reference", "1024 tokens")
    assert found["1024 tokens"]["state"] == "PASS"
    detail = found["float64 reference"]["detail"]
    assert "h.0.attn.pattern.gates.bias: " in detail and " 1.0e+00 " in detail
    monkeypatch.undo()

    combine = module.combine_branches

    def off(branches, gates):
        exact = torch.finfo(branches[0].dtype).eps < 1e-6
        return combine(branches, gates) * (1 if exact else 1.1)

    monkeypatch.setattr(module, "combine_branches", off)
    found = states(monkeypatch, "float64 reference", "bfloat16", "float16")
    assert [row["state"] for row in found.values()] == ["PASS", "FAIL", "FAIL"]


def test_an_unsupported_backend_is_absent(monkeypatch):
    def refuse(options, device):
        raise PreflightError(
            Problem("gather cannot run here", code="attention.backend-unsupported")
        )

    monkeypatch.setattr(validate, "resolve_backend", refuse)
    rows = validate.validate_device(CPU, True)
    detail = "gather cannot run here [attention.backend-unsupported]"
    assert {(row["state"], row["detail"]) for row in rows} == {("ABSENT", detail)}
    assert "8192 tokens" in {row["check"] for row in rows}
    assert rows[0].keys() == {"check", "backend", "state", "seconds", "detail"}
