"""One optimizer step: precision, and the norms of pruned gradients."""

import torch

from gpt2.training.loop import optimizer_step, train_step
from gpt2.training.metrics import MetricsLog
from lib.pruning.pruners import prunable_parameters

NO_PRUNING = {"PRUNING_MAGNITUDE": None, "PRUNING_FREQUENCY": None}


def test_bf16_gradients_are_those_of_each_micro_batch_by_itself(session):
    """Weights are cast once for all micro-batches, with the bits of casting them each time."""
    opened = session(
        PRECISION_BF16=True, PRECISION_WHY="as it is", DROPOUT="0.0", GRAD_CLIP="0", **NO_PRUNING
    )
    micro_batches = next(opened.batches())
    assert len(micro_batches) == 2
    for x_BT, y_BT in micro_batches:
        with torch.autocast("cpu", torch.bfloat16):
            loss = opened.model(x_BT, y_BT) / 2
        loss.backward()
    expected = torch.stack([p.grad.norm() for p in opened.model.parameters()])
    opened.optimizer.zero_grad()
    measured = optimizer_step(opened, micro_batches, 0.0)
    assert torch.equal(measured.gradient_norms, expected)


def test_pruned_weights_are_excluded_from_the_norm(session):
    opened = session(PRUNING_SPARSITY="0.9", GRAD_CLIP="0", GRAD_ACCUMULATION=1, BATCH_SIZE=4)
    opened.pruner.after_step(12, 1.0, opened.optimizer)
    # Keep the gradients for inspection.
    opened.optimizer.zero_grad = lambda set_to_none: None
    measured = optimizer_step(opened, next(opened.batches()), 0.0)
    prunable = prunable_parameters(opened.model, include_embeddings=False)
    for (name, _), norm in zip(
        opened.model.named_parameters(), measured.gradient_norms, strict=True
    ):
        if name in prunable:
            alive = prunable[name].grad[prunable[name] != 0]
            assert alive.numel() < 0.5 * prunable[name].numel()
            torch.testing.assert_close(norm, alive.norm(), rtol=1e-4, atol=0)


def test_bf16_runs_matrix_products_in_bf16_and_keeps_weights_in_fp32(session):
    opened = session(PRECISION_BF16=True, PRECISION_WHY="as it is")
    seen = []
    linear = opened.model.h[0].mlp.c_fc
    linear.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    train_step(opened, next(opened.batches()), MetricsLog(opened))
    assert set(seen) == {torch.bfloat16}
    assert {w.dtype for w in opened.weights().values()} == {torch.float32}
