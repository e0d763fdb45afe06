"""Train a plan, check the machine before, reproduce a finished run."""

# Modules that every worker would otherwise import itself; optimizers import torch._dynamo on first
# use. The parent process names them only: it imports no torch.
PRELOADED_MODULES = (
    "torch",
    "torch._dynamo",
    "torch._subclasses.fake_tensor",
    "torch.distributed",
    "gpt2.training.loop",
    "gpt2.running.preflight",
)
