"""Types of every operation in training and evaluation, stored types, and the places of dropout.

B batch, T tokens, C n_embd, N heads, H head dim, V vocabulary.
"""

import copy
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpt2.attention.state import BlockState
from gpt2.check.finding import CheckFinding, expect, within
from gpt2.check.subject import StepUnderTest
from gpt2.generate import generate
from gpt2.model import GPT, Block
from gpt2.training.loop import accumulate_gradients
from gpt2.training.state import TrainingSession

# Operations on sines and cosines, whatever their names.
_ROTATION = "rotation"
_NARROW = (torch.bfloat16, torch.float16)
_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Operations that need fp32: norms, softmax, loss, sums over tokens, gates.
_WIDE = {
    **dict.fromkeys(("native_layer_norm", "native_layer_norm_backward", "rsqrt"), "norm"),
    **dict.fromkeys(("_softmax", "_softmax_backward_data"), "softmax"),
    **dict.fromkeys(("_log_softmax", "_log_softmax_backward_data", "nll_loss_forward"), "loss"),
    **dict.fromkeys(("exp", "exp2", "log", "log2", "logsumexp"), "softmax"),
    **dict.fromkeys(("sin", "cos", _ROTATION), "rotary positions"),
    **dict.fromkeys(("cumsum", "cumsum_", "add_", "addcmul_", "index_add_"), "running sum"),
    "sigmoid": "gate",
}
# Products of linear layers. SDPA with dropout computes its batched products in fp32 on a CPU.
_PRODUCTS = ("mm", "addmm")
# Error of fp32 logits relative to the largest logit; bf16 has 4e-3.
_FP32_TOLERANCE = 1e-4
# Attention weights to drop: one for each head and row.
_DROPOUT, _WEIGHTS = 0.5, 16
_EXACT = 1e-12


class ObservedTypes(TorchDispatchMode):
    """Record the types of the floating-point inputs of every operation.

    The outputs of a rotation count too. Of an operation in place, only the first input accumulates;
    a running sum has the type of its output.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inputs: dict[str, set[torch.dtype]] = {}
        # Sines and cosines, by identity: the operations that read them are the rotation.
        self._factors: dict[int, Tensor] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Nothing is compiled here, and guards on every call take time.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run the operation and record its types."""
        name, out = func.overloadpacket.__name__, func(*args, **(kwargs or {}))
        tensors = args[:1] if name.endswith("_") else (out,) if name == "cumsum" else args
        self._record(name, tensors)
        rotates = self._factors and any(id(x) in self._factors for x in args)
        if rotates:
            self._record(_ROTATION, (*args, out))
        if name in ("sin", "cos") or (rotates and name == "_to_copy"):
            self._factors[id(out)] = out
        return out

    def _record(self, name: str, tensors: tuple[Any, ...]) -> None:
        self.inputs.setdefault(name, set()).update(
            x.dtype for x in tensors if isinstance(x, Tensor) and x.is_floating_point()
        )


def check_precise(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check the types in training, an evaluation and generated text, and the fp32 error."""
    session = subject.traced_run.session
    # All windows at once take the least time.
    evaluate = copy.copy(session.evaluate)
    evaluate.batch_size = len(evaluate.windows)
    types = {phase: ObservedTypes() for phase in ("training", "evaluation", "decoding")}
    with subject.chunked(session.model):
        first, *_ = next(session.batches())
        with torch.random.fork_rng([]), types["training"]:
            accumulate_gradients(session, [first])
        session.optimizer.zero_grad(set_to_none=True)
        with types["evaluation"]:
            evaluate(session.model)
        text = generate(session.model, torch.zeros(2).long(), 0, session.config.machine)
        with types["decoding"]:
            # A prompt, and a token that reads the caches.
            next(text), next(text)
    for phase, observed in types.items():
        yield from _operations(phase, observed.inputs, subject)
    yield from [*_stored(session)][:1]
    yield from _rounding(subject)
    yield from _dropout(subject)


def _operations(
    phase: str, inputs: Mapping[str, set[torch.dtype]], subject: StepUnderTest
) -> Iterator[CheckFinding]:
    """Check that products have the configured type, and that sensitive operations have fp32."""
    precision = _TYPES[str(subject.small.values["PRECISION"])]
    narrow, products = set(_NARROW), set().union(*(inputs.get(name, set()) for name in _PRODUCTS))
    # A pattern's own kernel computes its products in fp32.
    own_kernel = subject.config.model.attention.pattern.attends
    wrong = products - ({precision, torch.float32} if own_kernel else {precision})
    products_differ = products if wrong or precision not in products else set()
    other = {dtype for types in inputs.values() for dtype in types & narrow} - {precision}
    softmax = inputs.get("_softmax", set()) & {torch.float64}
    rows = [
        *(
            (
                "wide-operation",
                f"{kind} ({name}) in fp32 or wider",
                inputs.get(name, set()) & narrow,
            )
            for name, kind in _WIDE.items()
        ),
        ("wide-operation", "softmax in fp32", softmax),
        *(
            ("rotary-angles", "rotary angles in float64", inputs.get(name, set()) - {torch.float64})
            for name in ("sin", "cos")
        ),
        ("product-type", f"products in {precision}", products_differ),
        ("narrow-type", f"no type narrower than {precision}", other),
    ]
    for name, what, types in rows:
        found = ", ".join(sorted(map(str, types)))
        yield from expect(not types, name, f"{what} in {phase}", found)
    what = f"products in {precision} in {phase}"
    yield from expect(bool(products), "product-type", what, "none")


def _stored(session: TrainingSession) -> Iterator[CheckFinding]:
    """Check that weights, and the optimizer's state, are stored in fp32."""
    stored = {f"the weights {name}": w for name, w in session.weights().items()}
    for state in cast(torch.optim.Optimizer, session.optimizer).state.values():
        stored |= {f"the optimizer's {name}": value for name, value in state.items()}
    for name, value in stored.items():
        if isinstance(value, Tensor):
            wide, found = value.dtype not in _NARROW, str(value.dtype)
            yield from expect(wide, "stored-type", f"{name} in fp32", found)


def _rounding(subject: StepUnderTest) -> list[CheckFinding]:
    """Compare logits in fp32 with logits in float64.

    Compared is the median over tokens: where two weights or blocks have nearly equal ranks, the
    selection of single tokens may differ.
    """
    exact, idx_BT = subject.model, subject.tokens(1)
    with torch.no_grad():
        expected_TV, actual_TV = exact(idx_BT)[0], copy.deepcopy(exact).float()(idx_BT)[0]
    error_T = (actual_TV - expected_TV).abs().amax(-1)
    error = float(error_T.median() / expected_TV.abs().max())
    expected = f"logits in fp32 within {_FP32_TOLERANCE:g} of float64"
    return within("fp32-error", expected, error, _FP32_TOLERANCE)


def _dropout(subject: StepUnderTest) -> Iterator[CheckFinding]:
    """Check that dropout multiplies embeddings, attention weights and branches, and nothing else."""
    model = subject.dropping
    if model is None:
        return
    block, shape = model.blocks[0], model.config.shape
    embedded, dropped = (_embedded(model, subject.tokens(1), train) for train in (False, True))
    rows = -(-_WEIGHTS // shape.n_head)
    x_BTC = torch.randn(rows, shape.block_size, shape.n_embd, dtype=torch.float64)
    right, noisy = (_branches(block, x_BTC, train) for train in (False, True))
    heads, fewer = (run["heads"][:, 0].unflatten(-1, (shape.n_head, -1)) for run in (right, noisy))
    places = {
        "embeddings": _masked(embedded, dropped),
        # The first token attends to itself alone: one weight for each head.
        "attention weights": _masked(heads, fewer, whole_head=True),
        "the output of attention": _masked(noisy["projected"], noisy["attended"]),
        "the output of the MLP": _masked(noisy["mixed"], noisy["out"]),
    }
    for place, as_declared in places.items():
        expected = f"{place}: 0, or 1 / (1 - p) times the value"
        yield from expect(as_declared, "dropout-place", expected, "other values")
    undropped = {
        "weights": "the MLP reads attention weights before dropout",
        "mixed": "no dropout within the MLP",
    }
    for name, expected in undropped.items():
        same = torch.allclose(right[name], noisy[name], rtol=_EXACT, atol=_EXACT)
        yield from expect(same, "dropout-place", expected, "other values in training")


def _embedded(model: GPT, idx_BT: Tensor, training: bool) -> Tensor:
    """Return the input of the first block."""
    inputs: list[Tensor] = []
    hook = model.blocks[0].register_forward_pre_hook(lambda module, given: inputs.append(given[0]))
    model.train(training)
    with torch.no_grad(), torch.random.fork_rng([]):
        model.hidden(idx_BT)
    hook.remove()
    model.eval()
    return inputs[0]


def _branches(block: Block, x_BTC: Tensor, training: bool) -> dict[str, Tensor]:
    """Return inputs and outputs of the projections of both branches; the MLP reads fixed weights."""
    seen: dict[str, Tensor] = {}

    def record(name: str, source: str = "") -> Any:
        def hook(module: nn.Module, given: tuple[Tensor, ...], out: Tensor) -> None:
            seen[name] = out
            if source:
                seen[source] = given[0]

        return hook

    hooks = [
        block.attn.c_proj.register_forward_hook(record("projected", "heads")),
        block.mlp.c_proj.register_forward_hook(record("mixed")),
    ]
    with torch.no_grad(), torch.random.fork_rng([]):
        block.eval()
        _, view = block.attn(x_BTC, BlockState())
        block.train(training)
        torch.manual_seed(0)
        seen["attended"], trained_view = block.attn(x_BTC, BlockState())
        seen["out"], _ = block.mlp(x_BTC, view)
    block.eval()
    for hook in hooks:
        hook.remove()
    weights_BTS = trained_view.weights_BTS
    seen["weights"] = x_BTC[:0] if weights_BTS is None else weights_BTS
    return seen


def _masked(value: Tensor, dropped: Tensor, whole_head: bool = False) -> bool:
    """Return whether every element, or every head, is 0 or its value times 1 / (1 - p)."""
    zero, kept = dropped == 0.0, torch.isclose(dropped, value / (1 - _DROPOUT), rtol=1e-9)
    if whole_head:
        zero, kept = zero.all(-1), kept.all(-1)
    return bool((zero | kept).all()) and bool(zero.any()) and bool((kept & ~zero).any())
