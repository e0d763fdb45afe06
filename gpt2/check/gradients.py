"""Every parameter learns: a finite gradient other than zero, and a step of the optimizer."""

import torch
from torch import Tensor

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject
from gpt2.check.trial import WATCHED
from gpt2.config import Config
from gpt2.model import GPT


def check(subject: Subject) -> list[Finding]:
    """From the real initialisation within three steps, from filled parameters at once."""
    found = _from_initialisation(subject) + _from_filled(subject) + _optimized(subject)
    return found + (_computed_again(subject) if subject.config.model.grad_checkpointing else [])


def _from_initialisation(subject: Subject) -> list[Finding]:
    trial, found = subject.trial, []
    # SGD moves by the size of the gradient, which may be less than fp32 can add to a weight.
    always_moves = subject.config.optimizer.name != "sgd"
    for name, before in trial.start.items():
        if name in trial.not_finite:
            found.append(Finding(f"a finite gradient of {name}", "NaN or infinite"))
        elif name not in trial.with_gradient:
            text = f"none or zero in {WATCHED} optimizer steps from the initialisation"
            found.append(Finding(f"a gradient of {name}", text))
        elif always_moves and torch.equal(trial.watched[name], before):
            text = f"equal after {WATCHED} optimizer steps"
            found.append(Finding(f"the optimizer moves {name}", text))
    return found


def _from_filled(subject: Subject) -> list[Finding]:
    model, found = subject.model, []
    idx_BT = subject.tokens()
    with subject.in_pieces():
        model(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        parameter.grad = None
        if gradient is None or not bool(gradient.any()):
            text = "none or zero where no parameter is zero"
            found.append(Finding(f"a gradient of {name}", text))
        elif not bool(torch.isfinite(gradient).all()):
            found.append(Finding(f"a finite gradient of {name}", "NaN or infinite"))
    return found


def _computed_again(subject: Subject) -> list[Finding]:
    """Gradient checkpointing gives what keeping all would, with the configured dropout."""
    config, idx_BT = subject.shrunk, subject.tokens()
    kept, again = (_gradients(config, idx_BT, flag) for flag in (False, True))
    text = "another one with GRAD_CHECKPOINTING=n"
    return [
        Finding(f"the gradient of {name} to the bit, computed again or kept", text)
        for name in kept
        if not torch.equal(kept[name], again[name])
    ]


def _gradients(config: Config, idx_BT: Tensor, grad_checkpointing: bool) -> dict[str, Tensor]:
    """In fp32, of every parameter that has one, for one draw of dropout."""
    model = GPT(config.model)
    model.init_weights(config.seed)
    model.grad_checkpointing = grad_checkpointing
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model(idx_BT[:, :-1], idx_BT[:, 1:]).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def _optimized(subject: Subject) -> list[Finding]:
    """Each parameter stands in exactly one group of the optimizer."""
    session = subject.trial.rehearsal.session
    given = [id(p) for group in session.optimizer.param_groups for p in group["params"]]
    return [
        Finding(f"{name} in one group of the optimizer", f"in {given.count(id(parameter))}")
        for name, parameter in session.model.named_parameters()
        if given.count(id(parameter)) != 1
    ]
