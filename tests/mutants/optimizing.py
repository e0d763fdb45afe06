"""Faults of the optimizers, their parameter groups, and the trainer's step around them."""

from typing import Any

import torch
from torch import Tensor

from gpt2 import train
from gpt2.training import setup
from lib.optim import build, optimizers
from lib.optim.optimizers import Adam, Sgd
from lib.optim.options import AdamwspamOptions
from lib.optim.spam import Adamwspam
from tests.mutants.mutant import (
    Mutant,
    after_init,
    edited,
    entry,
    nothing,
    replaced,
    then,
    together,
)

_MATRIX = "test-matrix-optimizers"


def _caught(*patterns: str) -> Any:
    """Return the finding that updates from given gradients differ, at a described step."""
    return {"optimized": ("driven-update", *patterns)}


def _forgetting(self: Adamwspam, state: dict[str, Any]) -> None:
    """Drop SPAM's state."""
    torch.optim.AdamW.load_state_dict(self, {k: v for k, v in state.items() if k != "spam"})


def _grouped(owner: type, **numbers: Any) -> Any:
    """Return a plant that overrides values of every parameter group."""
    return after_init(owner, lambda self: [group.update(numbers) for group in self.param_groups])


def _turned(right: Any) -> Any:
    """Swap the betas during every update only."""

    def update(self: torch.optim.Adam, *given: Any, **named: Any) -> None:
        for group in self.param_groups:
            group["betas"] = group["betas"][::-1]
        right(self, *given, **named)
        for group in self.param_groups:
            group["betas"] = group["betas"][::-1]

    return update


def _regrouped(change: Any) -> Any:
    """Return a wrapper that changes the weight decay of each group during an update."""

    def make(right: Any) -> Any:
        def update(self: torch.optim.Optimizer, *given: Any, **named: Any) -> Any:
            before = [group["weight_decay"] for group in self.param_groups]
            for group in self.param_groups:
                group["weight_decay"] = change(group)
            out = right(self, *given, **named)
            for group, decay in zip(self.param_groups, before, strict=True):
                group["weight_decay"] = decay
            return out

        return update

    return make


@torch.no_grad()
def _adam(self: Adam, *, inside: bool = False, mixed: bool = False) -> None:
    """Update as AdamW, with ε inside the root, or with β1 in both bias corrections."""
    for group in self.param_groups:
        beta1, beta2 = group["betas"]
        for p in group["params"]:
            state = self.state[p]
            if not state:
                state["step"] = torch.zeros(())
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
            state["step"] += 1
            t = int(state["step"])
            state["exp_avg"].lerp_(p.grad, 1 - beta1)
            state["exp_avg_sq"].mul_(beta2).addcmul_(p.grad, p.grad, value=1 - beta2)
            v_hat = state["exp_avg_sq"] / (1 - (beta1 if mixed else beta2) ** t)
            root = (v_hat + group["eps"]).sqrt() if inside else v_hat.sqrt() + group["eps"]
            p.mul_(1 - group["lr"] * group["weight_decay"])
            p.sub_(group["lr"] * state["exp_avg"] / (1 - beta1**t) / root)


def _own_adam(**options: bool) -> Any:
    return replaced(Adam, "step", lambda _: lambda self, **named: _adam(self, **options))


def _largest_moment(out: Any, self: Adam, *given: Any) -> None:
    """Replace AdamWAdv's maximum of v by one of m²."""
    for state in self.state.values():
        state["max_exp_avg_sq"].copy_(state["exp_avg"].square())


def _first_damped(right: Any) -> Any:
    """Start the momentum with (1 − d) g."""

    def update(self: Sgd, *given: Any, **named: Any) -> Any:
        if not self.state:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(1 - group["dampening"])
        return right(self, *given, **named)

    return update


def _by_value(parameters: list[Any], limit: float, norm: Tensor) -> None:
    torch.nn.utils.clip_grad_value_(parameters, limit)


def _late(self: Adamwspam) -> None:
    self._norms = self._norms.new_zeros(len(self._norms) + 1)


def _restarted(out: Any, self: Adamwspam, state: Any) -> None:
    """Count the steps of a resumed run from its last reset."""
    self._steps = self._options.age(self._steps)


def _without_gates(out: dict[str, Any], model: Any) -> dict[str, Any]:
    return {name: p for name, p in out.items() if "gate" not in name}


def _with_embeddings(out: dict[str, Any], model: Any) -> dict[str, Any]:
    return out | optimizers.embedding_parameters(model)


def _all_decay(right: Any) -> Any:
    return lambda module, decay: [group | {"weight_decay": decay} for group in right(module, decay)]


MUTANTS = (
    Mutant(
        "SPAM is AdamW",
        "baseline",
        {"optimized": "driven-update"},
        together(
            nothing(Adamwspam, "_reset", "_clip", "_damp"),
            replaced(AdamwspamOptions, "warmup_factor", lambda _: lambda *given: 1.0),
        ),
    ),
    Mutant(
        "every optimizer is AdamW",
        "adamwspam-magnitude",
        {"optimized": "driven-update"},
        entry(build.MODULES, AdamwspamOptions, Adam),
        _MATRIX,
        beside=("adamw-magnitude",),
    ),
    Mutant(
        "betas are swapped",
        "baseline",
        {"optimized": ("optimizer-setting", r"betas \(0\.9, 0\.95\); \(0\.95, 0\.9\)")},
        _grouped(Adam, betas=(0.95, 0.9)),
    ),
    Mutant(
        "betas are swapped in the update",
        "adamw-none",
        {"optimized": "driven-update"},
        replaced(torch.optim.Adam, "step", _turned),
        _MATRIX,
    ),
    Mutant(
        "epsilon is wrong",
        "baseline",
        {"optimized": ("optimizer-setting", "eps 1e-08; 1e-07")},
        _grouped(Adam, eps=1e-7),
    ),
    Mutant(
        "epsilon is inside the root",
        "adamw-none",
        _caught("adamw at step 1 "),
        _own_adam(inside=True),
        _MATRIX,
        quick=True,
    ),
    Mutant(
        "bias correction of v uses the other beta",
        "adamw-none",
        {"optimized": "driven-update"},
        _own_adam(mixed=True),
        _MATRIX,
    ),
    Mutant(
        "AMSGrad is off",
        "adamwadv-magnitude",
        {"optimized": "driven-update"},
        _grouped(Adam, amsgrad=False),
        _MATRIX,
    ),
    Mutant(
        "AMSGrad keeps the largest first moment",
        "adamwadv-none",
        {"optimized": ("driven-update", "^the update of adamwadv at step 3 ")},
        then(Adam, "step", _largest_moment),
        _MATRIX,
    ),
    Mutant(
        "everything decays",
        "baseline",
        {"optimized": ("weight-decay", r"0 for .*; 0\.1")},
        replaced(setup, "parameter_groups", _all_decay),
    ),
    Mutant(
        "embeddings decay",
        "baseline",
        {"optimized": ("weight-decay", r"0 for wte\.weight; 0\.1")},
        then(optimizers, "matrix_parameters", _with_embeddings),
    ),
    Mutant(
        "gates do not decay",
        "golden-gate",
        {"optimized": ("weight-decay", r"0\.1 for .*gate.*; 0$")},
        then(optimizers, "matrix_parameters", _without_gates),
    ),
    Mutant(
        "weight decay ignores the learning rate",
        "adamw-none",
        _caught("adamw at step 1 .*matrix"),
        replaced(Adam, "step", _regrouped(lambda group: group["weight_decay"] / group["lr"])),
        _MATRIX,
    ),
    Mutant(
        "weight decay is part of the gradient",
        "adamw-none",
        _caught("adamw at step 1 .*matrix"),
        _grouped(Adam, decoupled_weight_decay=False),
        _MATRIX,
    ),
    Mutant(
        "SPAM resets one step late",
        "baseline",
        _caught("adamwspam at step 9 "),
        together(
            edited(AdamwspamOptions, "age", "self.interval", "(self.interval + 1)"),
            edited(AdamwspamOptions, "resets", "self.interval", "(self.interval + 1)"),
        ),
    ),
    Mutant(
        "SPAM's warm-up is linear",
        "baseline",
        _caught("adamwspam at step 9 .*1 after a reset"),
        edited(
            AdamwspamOptions,
            "warmup_factor",
            "(1.0 - math.cos(math.pi * age / self.reset_warmup_steps)) / 2.0",
            "age / self.reset_warmup_steps",
        ),
    ),
    Mutant(
        "SPAM's warm-up is one step late",
        "baseline",
        _caught("adamwspam at step 9 "),
        edited(AdamwspamOptions, "warmup_factor", "self.age(step)", "self.age(step) - 1"),
    ),
    Mutant(
        "SPAM warms up at the start",
        "baseline",
        {"optimized": "driven-update"},
        edited(AdamwspamOptions, "warmup_factor", "self.resets(step) == 0 or ", ""),
    ),
    Mutant(
        "SPAM keeps the bias correction at a reset",
        "baseline",
        {"optimized": "driven-update"},
        edited(
            Adamwspam,
            "_reset",
            "for tensor in state.values():",
            "for tensor in list(state.values())[1:]:",
        ),
    ),
    Mutant(
        "SPAM keeps AMSGrad's maximum at a reset",
        "baseline",
        _caught("adamwspam at step 9 "),
        edited(
            Adamwspam,
            "_reset",
            "for tensor in state.values():",
            "for tensor in list(state.values())[:3]:",
        ),
        settings={"SPAM_AMSGRAD": True},
    ),
    Mutant(
        "theta multiplies the root",
        "baseline",
        _caught("adamwspam at step 3 .*clipped"),
        edited(
            Adamwspam,
            "_clip",
            ".mul_(self._options.theta).sqrt_()",
            ".sqrt_().mul_(self._options.theta)",
        ),
    ),
    Mutant(
        "SPAM clips the first chunk of a matrix",
        "baseline",
        _caught("adamwspam at step .*clipped"),
        edited(
            Adamwspam,
            "_clip",
            "variance, gradient, strict=True",
            "variance[:1], gradient[:1], strict=True",
        ),
    ),
    Mutant(
        "SPAM clips one step late",
        "baseline",
        _caught("adamwspam at step 3 .*clipped"),
        edited(Adamwspam, "step", ">= self._options.clip_delay", "> self._options.clip_delay"),
    ),
    Mutant(
        "SPAM clips to zero without a second moment",
        "baseline",
        _caught("adamwspam at step 4 "),
        edited(Adamwspam, "_clip", "F.threshold(v, 0.0, math.inf)", "v.clone()"),
    ),
    Mutant(
        "window of spikes is one longer",
        "baseline",
        _caught("adamwspam at step 5 .*spike"),
        after_init(Adamwspam, _late),
    ),
    Mutant(
        "spike joins the window before it is compared",
        "baseline",
        _caught("adamwspam at step 5 .*spike"),
        edited(
            Adamwspam,
            "_record",
            "spike = None",
            "spike = None; self._norms[(self._steps - 1) % len(self._norms)] = norm",
        ),
    ),
    Mutant(
        "spikes are measured after clipping",
        "baseline",
        _caught("adamwspam at step 14 .*norm above GRAD_CLIP"),
        edited(train, "optimizer_step", ", gradient_norm=measured.gradient_norm", ""),
    ),
    Mutant(
        "spike threshold is a multiple of the mean",
        "baseline",
        _caught("adamwspam at step"),
        edited(Adamwspam, "_record", "spike_threshold * sigma", "spike_threshold * mean"),
    ),
    Mutant(
        "every norm above the mean is a spike",
        "baseline",
        _caught("adamwspam at step"),
        edited(Adamwspam, "_record", "mean + self._options.spike_threshold * sigma", "mean"),
    ),
    Mutant(
        "damping factors are swapped",
        "baseline",
        _caught("adamwspam at step 5 .*spike"),
        edited(
            Adamwspam,
            "_damp",
            '"exp_avg": self._options.moment_damping,\n        "exp_avg_sq": self._options.variance_damping,',
            '"exp_avg": self._options.variance_damping,\n        "exp_avg_sq": self._options.moment_damping,',
        ),
    ),
    Mutant(
        "moments are damped before the gradient is clipped",
        "baseline",
        _caught("adamwspam at step"),
        edited(
            Adamwspam,
            "step",
            "    self._clipped.zero_()",
            "    self._clipped.zero_()\n    if spike is not None:\n"
            "        self._damp(parameters, spike)\n        spike = None",
        ),
    ),
    Mutant(
        "resumed SPAM forgets its resets",
        "baseline",
        _caught("adamwspam at step"),
        then(Adamwspam, "load_state_dict", _restarted),
    ),
    Mutant(
        "checkpoint loses the state of SPAM",
        "baseline",
        {"reload": "resumed-weights", **_caught("adamwspam at step 13 .*resumed")},
        replaced(Adamwspam, "load_state_dict", lambda _: _forgetting),
    ),
    Mutant(
        "gradients are clipped by value",
        "adamw-none",
        _caught("adamw at step 5 "),
        replaced(torch.nn.utils, "clip_grads_with_norm_", lambda _: _by_value),
        _MATRIX,
    ),
    Mutant(
        "gradients are scaled up to GRAD_CLIP",
        "sgd-none",
        {"optimized": "driven-update"},
        then(
            torch.nn.utils,
            "clip_grads_with_norm_",
            lambda out, parameters, limit, norm: [
                p.grad.mul_(max(1.0, limit / float(norm))) for p in parameters if p.grad is not None
            ],
        ),
        _MATRIX,
    ),
    Mutant(
        "momentum starts damped",
        "run",
        {"optimized": "driven-update"},
        replaced(Sgd, "step", _first_damped),
        "gpt2-124m",
        settings={"OPTIMIZER_SGD": True, "SGD_DAMPENING": "0.5"},
    ),
    Mutant(
        "Nesterov is off",
        "run",
        {"optimized": ("optimizer-setting", "nesterov True; False")},
        _grouped(Sgd, nesterov=False),
        "gpt2-124m",
        settings={"OPTIMIZER_SGD": True, "SGD_NESTEROV": True},
    ),
    Mutant(
        "learning rate is of the previous step",
        "adam-none",
        {"optimized": "driven-update"},
        edited(
            train,
            "optimizer_step",
            '        group["lr"] = lr',
            '        group["lr"] = group.get("next_lr", lr)\n        group["next_lr"] = lr',
        ),
        _MATRIX,
    ),
)
