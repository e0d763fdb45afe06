"""The trainer's updates against the optimizer's formulas, in float64, element by element."""

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

# Tolerance relative to a tensor's total change, and to its size: fp32 rounds in every step.
_CHANGE_TOLERANCE = 1e-3
_SIZE_TOLERANCE = 1e-6
# The plain optimizer from which another one has to differ.
_PLAIN = "adamw"
# Values of AdamW's symbols if the configured optimizer does not set them.
_ADAM_DEFAULTS: dict[str, Value] = {"ADAM_BETA1": "0.9", "ADAM_BETA2": "0.999", "ADAM_EPS": "1e-8"}
# Fields of an optimizer's options with the same name in torch's parameter groups.
_GROUP_OPTIONS = ("eps", "momentum", "dampening", "nesterov")

Numbers = list[list[float]]


def replay(subject: Subject) -> list[Finding]:
    """Check the optimizer's settings, and its updates from the trial's gradients."""
    trial, config = subject.trial, subject.shrunk
    findings = _settings(trial, config)
    if not all(name in update.gradients for update in trial.updates for name in FOLLOWED):
        expected = "a gradient in every optimizer step"
        return [*findings, Finding("nonzero-gradient", expected, "none for the final norm")]
    name, rule = config.optimizer.name, rule_of(config)
    expected = _replayed(trial, rule)
    wrong = [
        parameter
        for parameter, values in zip(FOLLOWED, expected, strict=True)
        if not _equal(trial, parameter, values)
    ]
    if not wrong:
        return findings
    if rule.name != _PLAIN:
        adam = {
            symbol: value for symbol, value in _ADAM_DEFAULTS.items() if not config.values[symbol]
        }
        plain = _replayed(trial, rule_of(changed(config, OPTIMIZER=_PLAIN, **adam)))
        if all(
            _equal(trial, parameter, values)
            for parameter, values in zip(FOLLOWED, plain, strict=True)
        ):
            text = f"the same weights as {_PLAIN} from the same gradients"
            expected = f"an effect of {name}"
            return [*findings, Finding("distinct-optimizer", expected, text)]
    what = f"the updates of {name}"
    return [*findings, Finding("optimizer-update", what, f"other values of {wrong[0]}")]


def rule_of(config: Config) -> Any:
    """Return the options of the optimizer that updates weights: the base of AdamWPrune."""
    options = config.optimizer
    return options.base if options.name == "adamwprune" else options


def _settings(trial: Trial, config: Config) -> list[Finding]:
    """Check that parameter groups match the options, and that only matrices decay."""
    rule, session = rule_of(config), trial.rehearsal.session
    options = {field.name: vars(rule)[field.name] for field in dataclasses.fields(rule)}
    expected = {name: options[name] for name in _GROUP_OPTIONS if name in options}
    if "beta1" in options:
        expected["betas"] = (options["beta1"], options["beta2"])
    findings = []
    tables = {id(t.weight) for t in (session.model.wte, session.model.wpe) if t is not None}
    for group in session.optimizer.param_groups:
        for name, value in expected.items():
            if group[name] != value:
                text = f"an optimizer with {name} {value}"
                findings.append(Finding("optimizer-setting", text, f"{group[name]}"))
        for name, parameter in zip(group["param_names"], group["params"], strict=True):
            decays = parameter.ndim >= 2 and id(parameter) not in tables
            decay = rule.weight_decay if decays else 0.0
            if group["weight_decay"] != decay:
                text = f"a weight decay of {decay:g} for {name}"
                findings.append(Finding("weight-decay", text, f"{group['weight_decay']:g}"))
    return findings


def _replayed(trial: Trial, rule: Any) -> Numbers:
    """Return the followed tensors after the formulas were applied to the trial's gradients."""
    start = [first_numbers(trial.start[name]) for name in FOLLOWED]
    decays = [rule.weight_decay if trial.start[name].ndim >= 2 else 0.0 for name in FOLLOWED]
    # One more element has the norm of all other gradients: an optimizer may use the global norm.
    reference = OPTIMIZERS.reference(rule.name)([*start, [0.0]], rule, [*decays, 0.0])
    for update in trial.updates:
        gradients = [first_numbers(update.gradients[name]) for name in FOLLOWED]
        rest_squared = update.gradient_norm.item() ** 2 - sum(
            g * g for flat in gradients for g in flat
        )
        reference.step([*gradients, [math.sqrt(max(0.0, rest_squared))]], update.lr)
    parameters: Numbers = reference.parameters[:-1]
    return parameters


def _equal(trial: Trial, name: str, expected: Sequence[float]) -> bool:
    start, end = first_numbers(trial.start[name]), first_numbers(trial.end[name])
    distance = max(abs(w - s) for w, s in zip(expected, start, strict=True))
    tolerance = _CHANGE_TOLERANCE * distance + _SIZE_TOLERANCE * max(abs(w) for w in expected)
    # Pruned weights are zero; all others were only updated by the optimizer.
    pruned = trial.config.pruning.name != "none"
    pairs = [(e, w) for e, w in zip(end, expected, strict=True) if not (pruned and e == 0.0)]
    return all(math.isclose(e, w, rel_tol=0.0, abs_tol=tolerance) for e, w in pairs)
