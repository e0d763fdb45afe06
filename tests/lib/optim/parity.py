"""Differences of every optimizer from independent implementations after 50 steps.

    python -m tests.lib.optim.parity

prints the table; the tests bound its numbers. "loop" is ``reference.py`` beside each optimizer, in
Python float64; "torch" is torch's single-tensor loop, without fused kernels.
"""

import sys

import torch

from lib.config.layers import ConfigLayer
from lib.config.tree import KconfigTree
from lib.optim.options import OPTIMIZERS, SgdOptions
from lib.optim.reference import optimizer_reference
from tests.lib.optim.cases import (
    DECAYS,
    SETTINGS,
    STEPS,
    build,
    make_gradients,
    make_groups,
    make_parameters,
    rate,
    train,
)

_PRECISIONS = (torch.float32, torch.float64)


def from_loop(options, dtype):
    """Return the largest difference of a weight from the float64 reference."""
    parameters = make_parameters(dtype)
    reference = optimizer_reference(options, [p.flatten().tolist() for p in parameters], DECAYS)
    train(build(options, parameters), parameters)
    for step, gradients in enumerate(make_gradients(dtype)):
        reference.step([g.flatten().tolist() for g in gradients], rate(step))
    worst = 0.0
    for parameter, numbers in zip(parameters, reference.parameters, strict=True):
        expected = torch.tensor(numbers, dtype=torch.float64)
        worst = max(worst, float((parameter.detach().flatten() - expected).abs().max()))
    return worst


def from_torch(options):
    """Return the largest difference from torch's own loop in float64; None for SPAM (not in torch)."""
    if "spam" in str(options):
        return None
    ours, theirs = make_parameters(torch.float64), make_parameters(torch.float64)
    plain = _plain_torch(options, theirs)
    train(build(options, ours), ours)
    train(plain, theirs)
    return max(float((a - b).detach().abs().max()) for a, b in zip(ours, theirs, strict=True))


def _plain_torch(options, parameters):
    """Return torch's single-tensor optimizer."""
    base = options.base if options.name == "adamwprune" else options
    groups = make_groups(parameters)
    if isinstance(base, SgdOptions):
        momentum = {"momentum": base.momentum, "dampening": base.dampening}
        return torch.optim.SGD(groups, nesterov=base.nesterov, foreach=False, **momentum)
    kind = torch.optim.Adam if base.name == "adam" else torch.optim.AdamW
    amsgrad = base.name == "adamwadv" or base.amsgrad
    betas = (base.beta1, base.beta2)
    return kind(groups, betas=betas, eps=base.eps, amsgrad=amsgrad, foreach=False)


def main():
    """Print the table."""
    tree = KconfigTree()
    sys.stdout.write(f"largest difference of a weight after {STEPS} steps\n\n")
    sys.stdout.write("| optimizer | fp32, loop | float64, loop | float64, torch |\n|-|-:|-:|-:|\n")
    for name, settings in SETTINGS.items():
        values = tree.resolve([ConfigLayer.of("parity", name, settings)]).values
        (options,) = OPTIMIZERS.bind(values)
        found = [*(from_loop(options, dtype) for dtype in _PRECISIONS), from_torch(options)]
        cells = " | ".join("-" if d is None else f"{d:.1e}" for d in found)
        sys.stdout.write(f"| {name} | {cells} |\n")


if __name__ == "__main__":
    main()
