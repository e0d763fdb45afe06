"""Writing text with a model: plain sampling from its own distribution.

T tokens so far, V vocabulary.
"""

import torch
from torch import Tensor

from gpt2.model import GPT
from lib.machine.options import MachineConfig
from lib.machine.setup import autocast


def generate(
    model: GPT, prompt_T: Tensor, count: int, seed: int, block_size: int, machine: MachineConfig
) -> Tensor:
    """``prompt_T`` followed by ``count`` sampled tokens, as ids [T + count] on the CPU.

    Temperature 1 and no cut of the distribution. Draws from a generator of its own, seeded with
    ``seed``. The context is the last ``block_size`` tokens, run through the model anew each time.
    """
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    ids_T = prompt_T.to("cpu", torch.int64)
    training = model.training
    model.eval()
    with torch.no_grad():
        for _ in range(count):
            context_BT = ids_T[-block_size:].unsqueeze(0).to(device)
            with autocast(machine):
                logits_V = model.logits(model.hidden(context_BT)[0, -1])
            weights_V = torch.softmax(logits_V.float().cpu(), dim=-1)
            ids_T = torch.cat([ids_T, torch.multinomial(weights_V, 1, generator=generator)])
    model.train(training)
    return ids_T
