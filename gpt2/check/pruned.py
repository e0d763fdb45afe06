"""Pruning and a special optimizer act."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from gpt2.check.finding import Finding
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject
from gpt2.check.trial import FOLLOWED, Update
from gpt2.config import Config
from lib.binding import Value
from lib.optim import OPTIMIZERS
from lib.pruning.mask import Unprunable

# fp32, and one step of rounding in each iteration.
_TOLERANCE = 1e-5
_SPARSITY_TOLERANCE = 0.01
# Part of a tensor that may come to a zero by itself.
_ROUNDED = 0.01
# A vector and its matrix; the plain optimizer that a special one has to differ from.
_PLAIN = "adamw"
# Its numbers where the configured optimizer has none.
_ADAM: dict[str, Value] = {"ADAM_BETA1": "0.9", "ADAM_BETA2": "0.999", "ADAM_EPS": "1e-8"}


def check(subject: Subject) -> list[Finding]:
    """Sparsity along the trial's ramp, and its updates replayed by the configured optimizer."""
    found = _sparsity(subject) if subject.config.pruning.name != "none" else []
    return found + _optimizer(subject)


def _sparsity(subject: Subject) -> list[Finding]:
    trial, target = subject.trial, subject.config.pruning.target
    kept = _kept(trial.rehearsal.session.model)
    matrices = {
        name: w for name, w in trial.end.items() if name not in kept and _prunable(subject, name, w)
    }
    size = sum(w.numel() for w in matrices.values())
    reached = sum(int((w == 0).sum()) for w in matrices.values()) / size
    # Rows that pad the vocabulary are zero already, and may be pruned or not.
    padding = sum(int((trial.start[name] == 0).sum()) for name in matrices) / size
    found = []
    if not target - _SPARSITY_TOLERANCE <= reached <= target + padding + _SPARSITY_TOLERANCE:
        text = f"{reached:.1%} of the weights are zero at the end of the budget"
        found.append(Finding(f"a sparsity of {target:.0%}", text))
    for name in trial.end.keys() - matrices.keys():
        more = int((trial.end[name] == 0).sum()) - int((trial.start[name] == 0).sum())
        if more > _ROUNDED * trial.end[name].numel():
            found.append(Finding(f"{name} is not pruned", f"{more} of its weights became zero"))
    fallen = any(b < a for a, b in zip(trial.sparsity, trial.sparsity[1:]))
    if fallen or trial.sparsity[0] >= target:
        steps = ", ".join(f"{s:.1%}" for s in trial.sparsity)
        found.append(Finding("a sparsity that grows along the ramp", steps))
    return found


def _kept(model: nn.Module) -> set[str]:
    """Parameters of modules that ask not to be pruned."""
    asking = [path for path, module in model.named_modules() if isinstance(module, Unprunable)]
    return {name for name, _ in model.named_parameters() if name.startswith(tuple(asking))}


def _prunable(subject: Subject, name: str, weight: Tensor) -> bool:
    embedding = name in ("wte.weight", "wpe.weight")
    return weight.ndim >= 2 and (subject.config.pruning.include_embeddings or not embedding)


def _optimizer(subject: Subject) -> list[Finding]:
    trial, config = subject.trial, subject.shrunk
    name, vector = config.optimizer.name, FOLLOWED[0]
    start = {followed: trial.start[followed] for followed in FOLLOWED}
    if not all(followed in update.gradients for update in trial.updates for followed in FOLLOWED):
        return [Finding("a gradient in every optimizer step", "none for the final norm")]
    replayed = _replay(config, start, trial.updates)
    found = []
    if not _close(replayed[vector], trial.end[vector]):
        text = f"{vector} is not what {name} makes of its gradients"
        found.append(Finding(f"the trainer updates by {name}", text))
    # AdamWPrune trains by its base: what it adds is pruning.
    rule = config.optimizer.base.name if name == "adamwprune" else name
    if rule != _PLAIN:
        adam = {symbol: value for symbol, value in _ADAM.items() if not config.values[symbol]}
        plain = _replay(changed(config, OPTIMIZER=_PLAIN, **adam), start, trial.updates)
        if all(_close(replayed[followed], plain[followed]) for followed in FOLLOWED):
            text = f"the same weights as {_PLAIN} from the same gradients"
            found.append(Finding(f"{name} acts", text))
    return found


def _replay(
    config: Config, start: dict[str, Tensor], updates: Sequence[Update]
) -> dict[str, Tensor]:
    """What a new optimizer of the configuration makes of recorded gradients."""
    parameters = {name: torch.nn.Parameter(value.clone()) for name, value in start.items()}
    groups = [
        {"params": [(n, p)], "weight_decay": config.optimizer.weight_decay if p.ndim >= 2 else 0.0}
        for n, p in parameters.items()
    ]
    optimizer = OPTIMIZERS.module(config.optimizer.name)(groups, config.optimizer, updates[0].lr)
    for update in updates:
        for name, parameter in parameters.items():
            parameter.grad = update.gradients[name].clone()
        for group in optimizer.param_groups:
            group["lr"] = update.lr
        optimizer.step(gradient_norm=update.gradient_norm)
    return {name: parameter.detach() for name, parameter in parameters.items()}


def _close(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=_TOLERANCE, atol=_TOLERANCE / 10))
