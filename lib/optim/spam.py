"""AdamW with SPAM (arXiv 2501.06842) on torch's fused AdamW, without device synchronization.

Optimizer step n, with m and v from step n − 1:

1. if n − 1 is a positive multiple of the interval: reset m, v, AMSGrad's maximum and the bias
   correction to zero;
2. the step is a spike if its gradient norm exceeds mean + threshold · σ (population) of the
   previous ``spike_window`` norms; the norm is then added to the window, spike or not, so that a
   lasting new level soon stops being a spike;
3. from the ``clip_delay``-th step after the start or a reset: g ← clip(g, ±√(θ v)). An element
   with v = 0 has had no gradient yet, so there is no scale to detect a spike with, and it is not
   clipped: clipping to 0 would keep its v at 0 forever;
4. a spike multiplies m and v by the damping factors;
5. AdamW step at the learning rate times the warm-up factor.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from lib.env.sharded import local, sum_over_shards
from lib.optim.optimizers import Adam, ParameterGroup
from lib.optim.options import AdamwspamOptions


class Adamwspam(Adam):
    """AdamW with SPAM; its state is a step counter, a ring buffer of norms and a spike count."""

    # Elements that are clipped at once, as many as fit a CPU cache: each chunk is a kernel launch on a
    # GPU. The result does not depend on it.
    chunk_elements = 1 << 20

    def __init__(self, groups: list[ParameterGroup], options: AdamwspamOptions, lr: float) -> None:
        super().__init__(groups, options, lr)
        # With AMP support, torch's GradScaler would call step() on an overflow and let the fused
        # kernel skip it, and the step counter and norms would still advance. Without AMP support,
        # GradScaler checks for an overflow first and does not call step().
        self._step_supports_amp_scaling = False
        self._options = options
        self._steps = 0
        self._first = self.param_groups[0]["params"][0]
        plain = local(self._first)
        self._norms = plain.new_zeros(options.spike_window)
        self._spikes = plain.new_zeros(())
        # Clipped elements of the last step in this rank's rows, for statistics only.
        self._clipped = plain.new_zeros(())
        self._elements = sum(p.numel() for group in self.param_groups for p in group["params"])

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch declares overloads by the type of closure
        self,
        closure: Callable[[], float] | None = None,
        *,
        gradient_norm: torch.Tensor | None = None,
    ) -> None:
        """Update the parameters; clips ``.grad`` in place. See ``lib.optim.optimizers``."""
        assert closure is None, "SPAM reads the gradients before AdamW would call a closure"
        self._steps += 1
        groups = [group["params"] for group in self.param_groups]
        parameters = [p for group in groups for p in group if p.grad is not None]
        if self._options.age(self._steps) == 1:
            # Moments, AMSGrad's maximum and the steps of the bias correction.
            for state in self.state.values():
                for tensor in state.values():
                    tensor.zero_()
        if gradient_norm is None:
            gradient_norm = torch.nn.utils.get_total_norm([p.grad for p in parameters])
        spike = self._record(gradient_norm)
        self._clipped.zero_()
        if self._options.age(self._steps) >= self._options.clip_delay:
            self._clip(parameters)
        if spike is not None:
            self._damp(parameters, spike)
        self._update()

    def statistics(self) -> dict[str, float]:
        """Return spikes and resets so far, and the last step's clipped fraction and rate."""
        clipped, step = sum_over_shards(self._clipped, self._first), max(1, self._steps)
        rate = float(self.param_groups[0]["lr"]) * self._options.warmup_factor(step)
        return {
            "spam_spikes": int(self._spikes),
            "spam_resets": self._options.resets(step),
            "spam_clipped_fraction": float(clipped) / self._elements,
            "spam_learning_rate": rate,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return AdamW's state, with SPAM's state under ``spam``."""
        spam = {"steps": self._steps, "norms": self._norms, "spikes": self._spikes}
        return super().state_dict() | {"spam": spam}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore ``state_dict``. Raises KeyError if it belongs to another optimizer."""
        spam = state_dict["spam"]
        super().load_state_dict({k: v for k, v in state_dict.items() if k != "spam"})
        self._steps = spam["steps"]
        self._norms.copy_(spam["norms"])
        self._spikes.copy_(spam["spikes"])

    def _record(self, norm: torch.Tensor) -> torch.Tensor | None:
        """Record ``norm``; return whether it is a spike (0 or 1), None until the window is full."""
        spike = None
        if self._steps > len(self._norms):
            sigma, mean = torch.std_mean(self._norms, correction=0)
            spike = (norm > mean + self._options.spike_threshold * sigma).to(self._norms.dtype)
            self._spikes += spike
        self._norms[(self._steps - 1) % len(self._norms)] = norm
        return spike

    def _clip(self, parameters: list[torch.nn.Parameter]) -> None:
        """Clip the gradients of parameters with a second moment, and count the clipped elements.

        Chunks stay in a CPU's cache, and the code uses arithmetic only, because large temporaries
        and boolean masks are slow on CPUs.
        """
        for parameter in parameters:
            if parameter in self.state:
                assert parameter.grad is not None
                squares = local(self.state[parameter]["exp_avg_sq"])
                variance = squares.view(-1).split(self.chunk_elements)
                gradient = local(parameter.grad).view(-1).split(self.chunk_elements)
                for v, g in zip(variance, gradient, strict=True):
                    limit = F.threshold(v, 0.0, math.inf).mul_(self._options.theta).sqrt_()
                    clipped = torch.clamp(g, limit.neg(), limit)
                    self._clipped += (g - clipped).sign_().abs_().sum()
                    g.copy_(clipped)

    def _damp(self, parameters: list[torch.nn.Parameter], spike: torch.Tensor) -> None:
        """Multiply the moments by the damping factors at a spike, by exactly 1 otherwise."""
        o, states = self._options, [self.state[p] for p in parameters if p in self.state]
        for key, damping in (("exp_avg", o.moment_damping), ("exp_avg_sq", o.variance_damping)):
            torch._foreach_mul_([state[key] for state in states], 1.0 - spike * (1.0 - damping))

    def _update(self) -> None:
        rates = [group["lr"] for group in self.param_groups]
        factor = self._options.warmup_factor(self._steps)
        for group in self.param_groups:
            group["lr"] *= factor
        super().step()
        for group, rate in zip(self.param_groups, rates, strict=True):
            group["lr"] = rate
