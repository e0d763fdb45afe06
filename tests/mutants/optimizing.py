"""Faults of the optimizers, their parameter groups, and the trainer's step around them."""

from typing import Any

import torch

from gpt2.training import loop
from lib.optim import optimizers
from lib.optim.optimizers import Adam, Sgd
from lib.optim.options import AdamwspamOptions
from lib.optim.spam import Adamwspam
from tests.mutants.mutant import (
    Mutant,
    after_init,
    edited,
    replaced,
    then,
)

_MATRIX = "test-matrix-optimizers"


def _caught(*patterns: str) -> Any:
    """Return the finding that updates from given gradients differ, at a described step."""
    return {"optimized": ("driven-update", *patterns)}


def _grouped(owner: type, **numbers: Any) -> Any:
    """Return a plant that overrides values of every parameter group."""
    return after_init(owner, lambda self: [group.update(numbers) for group in self.param_groups])


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


def _first_damped(right: Any) -> Any:
    """Start the momentum with (1 − d) g."""

    def update(self: Sgd, *given: Any, **named: Any) -> Any:
        if not self.state:
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.grad.mul_(1 - group["dampening"])
        return right(self, *given, **named)

    return update


def _late(self: Adamwspam) -> None:
    self._norms = self._norms.new_zeros(len(self._norms) + 1)


def _restarted(out: Any, self: Adamwspam, state: Any) -> None:
    """Count the steps of a resumed run from its last reset."""
    self._steps = self._options.age(self._steps)


def _without_gates(out: dict[str, Any], model: Any) -> dict[str, Any]:
    return {name: p for name, p in out.items() if "gate" not in name}


def _hard_coded_clip(right: Any) -> Any:
    return lambda parameters, clip, norm: right(parameters, 1.0, norm)


MUTANTS = (
    Mutant(
        "betas are swapped",
        "baseline",
        _caught("adamwspam at step"),
        _grouped(Adam, betas=(0.95, 0.9)),
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
        "AMSGrad is off",
        "adamwadv-magnitude",
        {"optimized": "driven-update"},
        _grouped(Adam, amsgrad=False),
        _MATRIX,
    ),
    Mutant(
        "gates do not decay",
        "golden-gate",
        {"optimized": ("weight-decay", r"gate.* 0\.1; 0$")},
        then(optimizers, "matrix_parameters", _without_gates),
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
        "window of spikes is one longer",
        "baseline",
        _caught("adamwspam at step 5 .*spike"),
        after_init(Adamwspam, _late),
    ),
    Mutant(
        "spikes are measured after clipping",
        "baseline",
        _caught("adamwspam at step 14 .*norm above GRAD_CLIP"),
        edited(loop, "optimizer_step", ", gradient_norm=measured.gradient_norm", ""),
    ),
    Mutant(
        "sigma of the norms is that of a sample",
        "baseline",
        _caught("adamwspam at step"),
        edited(Adamwspam, "_record", "correction=0", "correction=1"),
    ),
    Mutant(
        "spike threshold is a multiple of the mean",
        "baseline",
        _caught("adamwspam at step 24 .*spike"),
        edited(Adamwspam, "_record", "spike_threshold * sigma", "spike_threshold * mean"),
    ),
    Mutant(
        "every norm above the mean is a spike",
        "baseline",
        _caught("adamwspam at step"),
        edited(Adamwspam, "_record", "mean + self._options.spike_threshold * sigma", "mean"),
    ),
    Mutant(
        "resumed SPAM forgets its resets",
        "baseline",
        _caught("adamwspam at step"),
        then(Adamwspam, "load_state_dict", _restarted),
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
        "the clipping norm is hard-coded",
        "baseline",
        {"optimized": "driven-update"},
        replaced(torch.nn.utils, "clip_grads_with_norm_", _hard_coded_clip),
    ),
)
