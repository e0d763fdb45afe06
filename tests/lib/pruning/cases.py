"""Every pruner on a small model, in the trainer's order of calls."""

from typing import Any

import torch
from torch import nn

from lib.config.field import SymbolValue
from lib.optim.build import build_optimizer
from lib.optim.optimizers import parameter_groups
from lib.optim.options import OPTIMIZERS
from lib.pruning.layers import PaddedEmbedding
from lib.pruning.options import PRUNERS, PRUNING_VARIANTS
from lib.pruning.pruners import build_pruner, prunable_parameters

STEPS = 40
# All other symbols have their defaults, so the ramp goes from step 4 to this one.
RAMP_END = 30

# Case → symbols.
SETTINGS: dict[str, dict[str, SymbolValue]] = {
    f"{pruner}-{scope}-{ramp}": {
        f"PRUNING_{pruner.upper()}": True,
        f"PRUNING_SCOPE_{scope.upper()}": True,
        f"PRUNING_RAMP_{ramp.upper()}": True,
        "OPTIMIZER_ADAMWADV": True,
    }
    for pruner in ("magnitude", "movement")
    for scope in ("global", "layer")
    for ramp in ("cubic", "linear")
}
SETTINGS["movement-sgd"] = {"PRUNING_MOVEMENT": True, "OPTIMIZER_SGD": True}
for variant in PRUNING_VARIANTS:
    SETTINGS[variant] = {
        "OPTIMIZER_ADAMWPRUNE": True,
        f"ADAMWPRUNE_VARIANT_{variant.upper()}": True,
    }
SETTINGS["bitter8-spam"] = {
    **SETTINGS["bitter8"],
    "ADAMWPRUNE_BASE_ADAMWSPAM": True,
    "SPAM_INTERVAL": 15,
    "SPAM_WARMUP_STEPS": 5,
    "SPAM_CLIP_DELAY": 5,
}


class Model(nn.Module):
    """Matrices of different scale, so that a global threshold prunes them differently."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(7)
        self.wte = PaddedEmbedding(20, 24, used_rows=12)
        self.norm = nn.LayerNorm(24)
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 20)
        self.third = nn.Linear(20, 12)
        with torch.no_grad():
            self.second.weight.mul_(3.0)
            self.wte.weight[12:] = 0.0

    def forward(self, tokens):
        """Return the logits."""
        hidden = torch.tanh(self.first(self.norm(self.wte(tokens))))
        return self.third(torch.tanh(self.second(hidden)))


class Trial:
    """Model in training with its optimizer and its pruner."""

    def __init__(self, values):
        (self.options,) = PRUNERS.bind(values)
        (optimizer,) = OPTIMIZERS.bind(values)
        self.model = Model()
        groups = parameter_groups(self.model, optimizer.weight_decay)
        self.optimizer: Any = build_optimizer(optimizer, groups, 1e-2)
        self.weights = prunable_parameters(self.model, self.options.include_embeddings)
        self.pruner: Any = build_pruner(self.options, self.model)
        self.tokens = torch.arange(12)
        # Gradients and weights of each step, for the movement scores.
        self.history: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = []

    def step(self, step):
        """Run step ``step`` (from 1) of ``STEPS``."""
        self.optimizer.zero_grad()
        logits = self.model(self.tokens)
        nn.functional.cross_entropy(logits, self.tokens.roll(1)).backward()
        self.pruner.mask_gradients()
        norm = nn.utils.get_total_norm([p.grad for p in self.model.parameters()])
        self.pruner.observe(norm)
        self.history.append(
            {n: (p.grad.clone(), p.detach().clone()) for n, p in self.weights.items()}
        )
        nn.utils.clip_grads_with_norm_(self.model.parameters(), 0.05, norm)
        self.optimizer.step(gradient_norm=norm)
        self.pruner.after_step(step, step / STEPS, self.optimizer)

    def steps(self, first, last):
        """Run steps ``first`` to ``last``, both included."""
        for step in range(first, last + 1):
            self.step(step)

    def zeros(self):
        """Return a mask of the zeros of each prunable weight."""
        return {name: p.detach() == 0 for name, p in self.weights.items()}
