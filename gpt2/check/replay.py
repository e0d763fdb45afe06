"""The trainer's updates against the optimizer's formulas, in float64, one number at a time."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

from gpt2.check.finding import Finding
from gpt2.check.shrink import changed
from gpt2.check.subject import Subject
from gpt2.check.trial import FOLLOWED, Trial, first_numbers
from gpt2.config import Config
from lib.binding import Value
from lib.optim import OPTIMIZERS

# Of the way that a tensor goes, and of its size: fp32, rounded in every step.
_OF_THE_WAY = 1e-3
_ROUNDING = 1e-6
# The plain optimizer that another one has to differ from.
_PLAIN = "adamw"
# Its numbers where the configured optimizer has none.
_ADAM: dict[str, Value] = {"ADAM_BETA1": "0.9", "ADAM_BETA2": "0.999", "ADAM_EPS": "1e-8"}
# Fields of an optimizer's options that torch's groups hold under the same name.
_HELD = ("eps", "momentum", "dampening", "nesterov")

Numbers = list[list[float]]


def replay(subject: Subject) -> list[Finding]:
    """What the optimizer was built with, and what it made of the trial's gradients."""
    trial, config = subject.trial, subject.shrunk
    found = _settings(trial, config)
    if not all(name in update.gradients for update in trial.updates for name in FOLLOWED):
        return [*found, Finding("a gradient in every optimizer step", "none for the final norm")]
    name, rule = config.optimizer.name, rule_of(config)
    wanted = _moved(trial, rule)
    wrong = [one for one, new in zip(FOLLOWED, wanted, strict=True) if not _equal(trial, one, new)]
    if not wrong:
        return found
    if rule.name != _PLAIN:
        adam = {symbol: value for symbol, value in _ADAM.items() if not config.values[symbol]}
        plain = _moved(trial, rule_of(changed(config, OPTIMIZER=_PLAIN, **adam)))
        if all(_equal(trial, one, new) for one, new in zip(FOLLOWED, plain, strict=True)):
            text = f"the same weights as {_PLAIN} from the same gradients"
            return [*found, Finding(f"{name} acts", text)]
    text = f"{wrong[0]} is not what {name} makes of its gradients"
    return [*found, Finding(f"the trainer updates by {name}", text)]


def rule_of(config: Config) -> Any:
    """The options of what moves the weights: AdamWPrune trains by its base."""
    options = config.optimizer
    return options.base if options.name == "adamwprune" else options


def _settings(trial: Trial, config: Config) -> list[Finding]:
    """The groups hold what the options say; of the parameters only matrices decay."""
    rule, session = rule_of(config), trial.rehearsal.session
    options = {field.name: vars(rule)[field.name] for field in dataclasses.fields(rule)}
    wanted = {name: options[name] for name in _HELD if name in options}
    if "beta1" in options:
        wanted["betas"] = (options["beta1"], options["beta2"])
    found = []
    tables = {id(t.weight) for t in (session.model.wte, session.model.wpe) if t is not None}
    for group in session.optimizer.param_groups:
        for name, value in wanted.items():
            if group[name] != value:
                found.append(Finding(f"an optimizer with {name} {value}", f"{group[name]}"))
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            decays = parameter.ndim >= 2 and id(parameter) not in tables
            decay = rule.weight_decay if decays else 0.0
            if group["weight_decay"] != decay:
                text = f"{group['weight_decay']:g}"
                found.append(Finding(f"a weight decay of {decay:g} for {name}", text))
    return found


def _moved(trial: Trial, rule: Any) -> Numbers:
    """Where the formulas take the followed tensors from where they started."""
    start = [first_numbers(trial.start[name]) for name in FOLLOWED]
    decays = [rule.weight_decay if trial.start[name].ndim >= 2 else 0.0 for name in FOLLOWED]
    # All other gradients are one more number: a rule may look at the norm of all.
    reference = OPTIMIZERS.reference(rule.name)([*start, [0.0]], rule, [*decays, 0.0])
    for update in trial.updates:
        gradients = [first_numbers(update.gradients[name]) for name in FOLLOWED]
        rest = update.gradient_norm.item() ** 2 - sum(g * g for flat in gradients for g in flat)
        reference.step([*gradients, [math.sqrt(max(0.0, rest))]], update.lr)
    found: Numbers = reference.parameters[:-1]
    return found


def _equal(trial: Trial, name: str, wanted: Sequence[float]) -> bool:
    start, end = first_numbers(trial.start[name]), first_numbers(trial.end[name])
    way = max(abs(w - s) for w, s in zip(wanted, start, strict=True))
    allowed = _OF_THE_WAY * way + _ROUNDING * max(abs(w) for w in wanted)
    # A weight that was pruned is zero; one that was not has been moved by the optimizer alone.
    pruned = trial.config.pruning.name != "none"
    pairs = [(e, w) for e, w in zip(end, wanted, strict=True) if not (pruned and e == 0.0)]
    return all(math.isclose(e, w, rel_tol=0.0, abs_tol=allowed) for e, w in pairs)
