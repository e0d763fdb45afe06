"""The device's proof: green as it is, red on a fault, absent where a backend cannot run."""

import dataclasses

import torch

from gpt2.attention.nsa import module
from gpt2.attention.nsa.cache import NsaCache
from gpt2.validation import machine
from lib.errors import PreflightError, Problem

CPU = torch.device("cpu")


def states(monkeypatch, *names):
    """Of these checks, on the blocks backend."""
    monkeypatch.setattr(machine, "BACKENDS", ("blocks",))
    return {row.check: row for row in machine.validate(CPU, False) if row.check in names}


def test_nothing_is_red_without_a_fault():
    rows = machine.validate(CPU, False)
    assert {row.state for row in rows} == {"PASS"}, machine.to_markdown(rows)
    assert {row.backend for row in rows} == {"blocks", "gather"} and len(rows) == 12


def test_a_leak_and_a_wrong_step_are(monkeypatch):
    right = module.attend_window
    monkeypatch.setattr(
        module, "attend_window", lambda q, k, v, w: right(q, k.roll(-1, 2), v.roll(-1, 2), w)
    )
    found = states(monkeypatch, "causality", "float64 reference", "1024 tokens")
    assert [row.state for row in found.values()] == ["FAIL"] * 3
    assert found["1024 tokens"].detail.startswith("window: differs by")
    monkeypatch.undo()
    read = NsaCache._read
    monkeypatch.setattr(NsaCache, "_read", lambda self, b, q, k, v: 1.01 * read(self, b, q, k, v))
    assert states(monkeypatch, "decode = prefill")["decode = prefill"].state == "FAIL"


def test_what_cannot_run_is_absent(monkeypatch):
    def refuse(options, device):
        raise PreflightError(Problem("gather cannot run here"))

    monkeypatch.setattr(machine, "resolve_backend", refuse)
    rows = machine.validate(CPU, True)
    assert {(row.state, row.detail) for row in rows} == {("ABSENT", "gather cannot run here")}
    assert "| 8192 tokens | blocks | ABSENT |" in machine.to_markdown(rows)
    assert dataclasses.asdict(rows[0]).keys() == {"check", "backend", "state", "seconds", "detail"}
