"""Every parameter learns: its gradient is finite and nonzero, and the optimizer updates it."""

import torch
from torch import Tensor

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.check.trial import WATCHED
from gpt2.config import Config
from gpt2.model import GPT


def check(subject: Subject) -> list[Finding]:
    """Check gradients from the real initialization and from filled parameters."""
    findings = _from_initialization(subject) + _from_filled(subject) + _optimized(subject)
    return findings + (_recomputed(subject) if subject.config.model.grad_checkpointing else [])


def _from_initialization(subject: Subject) -> list[Finding]:
    trial, findings = subject.trial, []
    # The step of SGD scales with the gradient and may be below the fp32 resolution of a weight.
    always_moves = subject.config.optimizer.name != "sgd"
    for name, before in trial.start.items():
        if name in trial.not_finite:
            expected = f"a finite gradient of {name}"
            findings.append(Finding("finite-gradient", expected, "NaN or infinite"))
        elif name not in trial.with_gradient:
            text = f"none or zero in {WATCHED} optimizer steps from the initialization"
            findings.append(Finding("nonzero-gradient", f"a gradient of {name}", text))
        elif always_moves and torch.equal(trial.watched[name], before):
            text = f"no change after {WATCHED} optimizer steps"
            findings.append(Finding("moving-parameter", f"the optimizer updates {name}", text))
    return findings


def _from_filled(subject: Subject) -> list[Finding]:
    model, findings = subject.model, []
    idx_BT = subject.tokens()
    with subject.in_pieces():
        model(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None or not bool(gradient.any()):
            text = "none or zero, although no parameter is zero"
            findings.append(Finding("nonzero-gradient", f"a gradient of {name}", text))
        elif not bool(torch.isfinite(gradient).all()):
            expected = f"a finite gradient of {name}"
            findings.append(Finding("finite-gradient", expected, "NaN or infinite"))
    return findings


def _recomputed(subject: Subject) -> list[Finding]:
    """Check that gradient checkpointing leaves gradients unchanged, with configured dropout."""
    config, idx_BT = subject.shrunk, subject.tokens()
    stored, recomputed = (_gradients(config, idx_BT, flag) for flag in (False, True))
    text = "another gradient with GRAD_CHECKPOINTING=n"
    return [
        Finding(
            "recomputed-gradient", f"the same bits of the gradient of {name} if recomputed", text
        )
        for name in stored
        if not torch.equal(stored[name], recomputed[name])
    ]


def _gradients(config: Config, idx_BT: Tensor, grad_checkpointing: bool) -> dict[str, Tensor]:
    """Return all gradients in fp32, for one seed of dropout."""
    model = GPT(config.model)
    model.init_weights(config.seed)
    model.grad_checkpointing = grad_checkpointing
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _optimized(subject: Subject) -> list[Finding]:
    """Check that each parameter is in exactly one parameter group of the optimizer."""
    session = subject.trial.rehearsal.session
    grouped = [id(p) for group in session.optimizer.param_groups for p in group["params"]]
    return [
        Finding(
            "optimizer-groups",
            f"{name} in one parameter group",
            f"in {grouped.count(id(parameter))}",
        )
        for name, parameter in session.model.named_parameters()
        if grouped.count(id(parameter)) != 1
    ]
