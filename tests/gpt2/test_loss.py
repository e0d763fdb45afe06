"""Cross-entropy of the head, against torch's cross-entropy for every chunking."""

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpt2.loss import (
    IGNORE_INDEX,
    LogitsChunks,
    fused_loss,
    linear_cross_entropy,
    linear_token_losses,
    masked_cross_entropy,
)
from gpt2.running import kernel_checks
from gpt2.running.kernel_checks import check_loss
from lib.errors import PreflightError, RunError
from tests.gpt2.attention.test_forms import CPU
from tests.gpt2.builders import make_model_config, needs_interpreter

TOKENS, WIDTH, VOCAB, PADDED = 37, 16, 50, 64
# name → bytes of a chunk in float64, elements of a block
FORMS = {
    "plain": (2**27, 2**21),
    "one chunk, one row a block": (2**27, 1),
    "chunks of 8 rows": (8 * 8 * PADDED, 1),
    "chunks of 8 rows, blocks of 3": (8 * 8 * PADDED, 3 * PADDED),
}


@pytest.fixture(params=FORMS)
def form(request):
    """Return chunk and block sizes."""
    return LogitsChunks(*FORMS[request.param])


@pytest.fixture(params=[*FORMS, "masked"])
def loss(request):
    """Return the loss of each form, and of a compiled model on a GPU."""
    if request.param == "masked":
        return masked_cross_entropy
    return partial(linear_cross_entropy, pieces=LogitsChunks(*FORMS[request.param]))


def data(dtype=torch.float64):
    """Return hidden states, a padded weight and targets with every fifth ignored."""
    torch.manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, dtype=dtype).requires_grad_()
    weight = torch.randn(PADDED, WIDTH, dtype=dtype).requires_grad_()
    targets = torch.randint(0, VOCAB, (TOKENS,))
    targets[::5] = IGNORE_INDEX
    return hidden, weight, targets


def unpadded(hidden, weight, targets, z_loss=0.0):
    """Compute torch's loss over the unpadded vocabulary, and the z-loss from its definition."""
    logits = hidden @ weight[:VOCAB].T
    log_z = logits[targets != IGNORE_INDEX].exp().sum(-1).log()
    return F.cross_entropy(logits, targets) + z_loss * (log_z * log_z).mean()


@pytest.mark.parametrize("z", [0.0, 0.3])
def test_loss_and_gradients_are_those_of_the_unpadded_vocabulary(loss, z):
    hidden, weight, targets = data()

    mine, its = loss(hidden, weight, targets, VOCAB, z_loss=z), unpadded(hidden, weight, targets, z)
    with torch.no_grad():
        without = loss(hidden, weight, targets, VOCAB, z_loss=z)

    torch.testing.assert_close([mine.detach(), without], [its.detach()] * 2, rtol=1e-13, atol=0)
    grads, expected = (torch.autograd.grad(x * 0.25, (hidden, weight)) for x in (mine, its))
    torch.testing.assert_close(grads, expected, rtol=1e-12, atol=1e-16)
    assert not grads[1][VOCAB:].any()
    assert not grads[0][::5].any()


@pytest.mark.parametrize("log_z", [0.0, -2.0, 60.0])
def test_the_z_loss_shifts_the_logits_of_a_token_to_where_log_z_is_zero(loss, log_z):
    """A shift of all logits changes no cross-entropy: its gradient is that of the z-loss, 2c log Z."""
    weight, targets = torch.ones(VOCAB, 1).double(), torch.tensor([7])
    # Equal logits x have the log Z of x + log V.
    hidden = torch.tensor([[log_z - math.log(VOCAB)]], dtype=torch.float64).requires_grad_()
    value = loss(hidden, weight, targets, VOCAB, z_loss=0.5)
    assert value.item() == pytest.approx(math.log(VOCAB) + 0.5 * log_z**2)
    (slope,) = torch.autograd.grad(value, hidden)
    assert slope.item() == pytest.approx(log_z, abs=1e-12)


def test_a_hopeless_token_costs_its_full_price(loss):
    # exp(−1000) is zero even in float64: the loss must not come from the probability.
    hidden = torch.tensor([[1000.0, 0.0]]).requires_grad_()

    mine = loss(hidden, torch.eye(2).requires_grad_(), torch.tensor([1]), 2)

    assert mine.item() == 1000.0
    assert torch.autograd.grad(mine, hidden)[0].tolist() == [[1.0, -1.0]]


def test_all_targets_ignored_is_nan_as_in_torch(loss):
    hidden, weight, targets = data()

    assert loss(hidden, weight, targets.fill_(IGNORE_INDEX), VOCAB).isnan()


def test_bfloat16_is_as_precise_as_torch_under_autocast(form):
    hidden, weight, targets = data(torch.float32)
    exact = unpadded(hidden.double(), weight.double(), targets)
    exact_grads = torch.autograd.grad(exact, (hidden, weight))

    def measure(function):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = function()
        assert value.dtype == torch.float32
        grads = torch.autograd.grad(value, (hidden, weight))
        assert all(grad.dtype == torch.float32 for grad in grads)
        pairs = zip(grads, exact_grads, strict=True)
        return value.item(), [((g - e).norm() / e.norm()).item() for g, e in pairs]

    mine, my_errors = measure(lambda: linear_cross_entropy(hidden, weight, targets, VOCAB, form))
    its, its_errors = measure(
        lambda: F.cross_entropy(F.linear(hidden, weight)[:, :VOCAB].float(), targets)
    )

    # The same bfloat16 logits, and softmax in float32 in both.
    assert mine == pytest.approx(its, rel=1e-5)
    assert all(m < 1.2 * i for m, i in zip(my_errors, its_errors, strict=True))
    assert max(my_errors) < 0.01


def test_second_backward_is_refused_instead_of_wrong():
    form = LogitsChunks(block_elements=1)
    hidden, weight, targets = data()
    mine = linear_cross_entropy(hidden, weight, targets, VOCAB, form)

    mine.backward(retain_graph=True)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        mine.backward()


def test_token_losses_and_hits(form):
    hidden, weight, targets = data()
    logits = (hidden @ weight[:VOCAB].T).detach()

    losses, correct, confidence = linear_token_losses(hidden, weight, targets, VOCAB, form)

    expected = F.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(losses, expected, rtol=1e-13, atol=0)
    assert correct.tolist() == (logits.argmax(-1) == targets).tolist()
    largest = torch.softmax(logits, -1).amax(-1) * (targets != IGNORE_INDEX)
    torch.testing.assert_close(confidence, largest, rtol=1e-12, atol=0)
    assert not losses[::5].any() and not correct[::5].any() and not confidence[::5].any()
    assert not losses.requires_grad


LIGER = """
import json, torch
from triton.runtime.interpreter import InterpretedFunction
from gpt2.loss import IGNORE_INDEX, _liger_loss, linear_cross_entropy

found = {}
for name, z in (("float32", 0.0), ("float32", 0.1), ("float16", 0.1)):
    dtype, V = getattr(torch, name), 50
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator) * 0.5 for n in (37, V + 14))
    targets = torch.randint(0, V, (37,), generator=generator)
    targets[::5] = IGNORE_INDEX
    results = []
    for as_type in (torch.float64, dtype):
        leaves = [x.to(dtype).to(as_type).requires_grad_() for x in (hidden, weight)]
        loss = linear_cross_entropy(*leaves, targets, V, fused=_liger_loss, z_loss=z)
        results.append([loss.detach(), *torch.autograd.grad(loss, leaves)])
    errors = [float((a.double() - e).norm() / e.norm()) for e, a in zip(*results)]
    found[f"{name} {z}"] = [*errors, bool(results[1][2][V:].any())]
print(json.dumps(found))
"""


@needs_interpreter
@pytest.mark.skipif(find_spec("liger_kernel") is None, reason="needs the package liger-kernel")
@pytest.mark.slow
def test_liger_computes_the_loss_and_its_gradients():
    """In Triton's interpreter: padding and ignored targets; float64 by torch."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", LIGER]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 3
    for name, (*errors, padded) in found.items():
        assert max(errors) <= (2e-6 if "float32" in name else 2e-3) and not padded, name


def test_a_fused_loss_is_for_training_in_single_and_half_precision():
    called = []

    def fused(hidden, weight, targets, vocab_size, z_loss):
        called.append((vocab_size, z_loss))
        return hidden.sum() * 0

    assert linear_cross_entropy(*data(torch.float32), VOCAB, fused=fused, z_loss=0.2) == 0
    with torch.no_grad():
        linear_cross_entropy(*data(torch.float32), VOCAB, fused=fused)
    linear_cross_entropy(*data(torch.float64), VOCAB, fused=fused)
    assert called == [(VOCAB, 0.2)]


def test_the_kernel_is_refused_on_a_cpu_and_without_its_packages(monkeypatch):
    cpu = torch.device("cpu")
    assert fused_loss("auto", cpu) is None and fused_loss("torch", cpu) is None
    model = replace(make_model_config(), loss_backend="triton")
    for package, code in ((True, "gpu.unsupported"), (None, "env.missing-package")):
        monkeypatch.setattr("importlib.util.find_spec", lambda name, package=package: package)
        with pytest.raises(RunError) as run:
            fused_loss("triton", cpu)
        with pytest.raises(PreflightError) as before:
            check_loss(model, CPU)
        assert run.value.codes == before.value.codes == [code]
        assert "SET=LOSS_BACKEND_TORCH=y" in before.value.problems[0].next
    check_loss(make_model_config(), CPU)


def changed(loss, by):
    """Return the loss, after a change in place to its value."""
    with torch.no_grad():
        by(loss)
    return loss


@pytest.mark.parametrize(
    "change",
    [
        lambda loss: loss,
        lambda loss: changed(loss, lambda x: x.mul_(1.001)),
        lambda loss: loss + 0.001 * (loss - loss.detach()),
        lambda loss: changed(loss, lambda x: x.add_(torch.rand(()))),
    ],
    ids=["equal", "loss", "gradient", "race"],
)
def test_preflight_compares_the_kernel_with_torch(monkeypatch, request, change):
    def fused(hidden, weight, targets, vocab_size, z_loss):
        logits = hidden @ weight[:vocab_size].T
        shift = z_loss * torch.logsumexp(logits, 1).square().mean()
        result: Tensor = change(F.cross_entropy(logits, targets) + shift)
        return result

    monkeypatch.setattr(kernel_checks, "fused_loss", lambda *_: fused)
    model = make_model_config(z_loss=0.01)
    check_loss(model, replace(CPU, compile=True))
    if "equal" in request.node.name:
        check_loss(model, CPU)
        return
    with pytest.raises(PreflightError) as caught:
        check_loss(model, CPU)
    assert caught.value.codes == ["gpu.wrong-values"]
