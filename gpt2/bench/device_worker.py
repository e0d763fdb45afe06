"""Measurements on this machine's GPU, or on its CPU; each prints JSON lines.

    python -m gpt2.bench.device_worker steps SECONDS < VALUES.json
    python -m gpt2.bench.device_worker parity < VALUES.json
    python -m gpt2.bench.device_worker plain BATCH < VALUES.json

steps: the rates that the device reaches, then for each configuration, until SECONDS have passed, the
time of the trainer's step on random tokens beside the prediction from these rates, with peak memory,
launches, the longest kernels, and the operations that waited for the device.

parity: the loss, and logits and gradients of two blocks of each configuration, by every backend and
precision, against torch's loss and the row engine in float64.

plain: the first configuration's model without mechanisms, eager and compiled, beside a plain loop
over a GPT-2 of a few lines.

B batch, T tokens, C n_embd, N heads, H head dim, V vocabulary.
"""

import dataclasses
import json
import math
import statistics
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gpt2.attention.config import (
    select_backend,
    unsupported_by_triton,
)
from gpt2.attention.kernels import TOLERANCES, relative_errors
from gpt2.attention.sdpa import BACKENDS, DTYPES
from gpt2.bench.runner import time_calls
from gpt2.check.subject import fill_parameters
from gpt2.config import Config
from gpt2.loss import LogitsChunks, linear_cross_entropy, softmax_gradient
from gpt2.memory.cost import DeviceRates
from gpt2.memory.fake_step import FakeTrainingStep, MinimalTraining
from gpt2.memory.predict import step_prediction
from gpt2.model import GPT
from lib.env.gpu import Gpu, local_gpu, peak_memory_bytes
from lib.env.machine import autocast, set_up
from lib.env.observe import device_name
from lib.env.ranks import current_process
from lib.errors import EXIT_DONE, EXIT_FAILED, ConfigError, RunError

_WARM_UP, _STEPS = 2, 5
# Tokens per sequence of the parity check: no multiple of a kernel's tile.
_PARITY_TOKENS = 200
_TOP_KERNELS = 4


def median_seconds(device: torch.device, work: Callable[[], Any], count: int = _STEPS) -> float:
    """Return the median time of ``count`` calls after a warm-up, each finished on the device."""

    def finished() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return statistics.median(time_calls(finished, count, _WARM_UP))


def device_rates(config: Config, device: torch.device) -> DeviceRates:
    """Measure the rates of products, attention, memory and launches."""
    gpu = device.type == "cuda"
    rows, batch, length, elements = (32768, 16, 1024, 2**27) if gpu else (256, 1, 256, 2**23)
    half = torch.float16 if config.machine.precision == "fp16" else torch.bfloat16
    flops = {}
    for kind, dtype in (("half", half), ("fp32", torch.float32)):
        x, w = (
            torch.randn(size, device=device, dtype=dtype) for size in ((rows, 768), (768, 3072))
        )
        flops[kind] = 2 * rows * 768 * 3072 / median_seconds(device, partial(torch.mm, x, w))
        size = (batch, 12, length, 64)
        q, k, v, gradient = (torch.randn(size, device=device, dtype=dtype) for _ in range(4))
        leaves = [tensor.requires_grad_() for tensor in (q, k, v)]

        def attend(leaves: Sequence[Tensor] = leaves, gradient: Tensor = gradient) -> None:
            q, k, v = leaves
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            torch.autograd.grad(context, leaves, gradient)

        # Two products forward and five backward over half of the pairs.
        products = 14 * batch * 12 * length * (length + 1) / 2 * 64
        flops[f"attention-{kind}"] = products / median_seconds(device, attend)
    source, target = (torch.empty(elements, device=device, dtype=half) for _ in range(2))
    copied = 4 * elements / median_seconds(device, lambda: target.copy_(source))
    rates = DeviceRates(flops, copied)
    # A step of few tokens is bound by its launches, except for the update of all parameters.
    small = _sized(config, 1, min(16, config.model.shape.block_size))
    kernels = FakeTrainingStep(small).needs(local_gpu(), 1).kernels
    training = MinimalTraining(small, device)
    seconds = median_seconds(device, lambda: training.step([_tokens(small, device)]))
    launches = sum(kernels.passes.values()) + sum(kernels.update.values())
    host = max(1e-7, (seconds - rates.device_seconds(kernels.update)) / launches)
    return dataclasses.replace(rates, launch_seconds=host)


def step_row(config: Config, device: torch.device, rates: DeviceRates, gpu: Gpu | None) -> Any:
    """Return the figures of a step of one micro-batch beside its prediction."""
    config = _sized(config, config.train.batch_size, config.model.shape.block_size)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    training, tokens = MinimalTraining(config, device), _tokens(config, device)
    training.model.train()
    seconds = median_seconds(device, lambda: training.step([tokens]))
    peak = peak_memory_bytes(device)
    predicted = None
    if config.model.attention.pattern.predicted and not config.machine.compile:
        predicted = step_prediction(config, gpu, rates)
    return {
        "tokens": tokens.numel() - len(tokens),
        "seconds": seconds,
        "predicted_seconds": predicted and predicted.seconds,
        "predicted_launches": predicted and predicted.launches,
        "flops_per_token": config.model.flops_per_token(),
        "peak_bytes": peak,
        "predicted_bytes": predicted and predicted.peak_bytes,
        **_observed(device, lambda: training.step([tokens])),
    }


def _observed(device: torch.device, step: Callable[[], None]) -> dict[str, Any]:
    """Return launches, busy seconds, longest kernels, and the waits of the host in a step."""
    if device.type != "cuda":
        return {"launches": None, "busy_seconds": None, "kernels": [], "waits": []}
    torch.cuda.set_sync_debug_mode("warn")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    torch.cuda.set_sync_debug_mode("default")
    waits = [f"{w.filename}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    torch.cuda.synchronize(device)
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiled:
        step()
        torch.cuda.synchronize(device)
    times: Counter[str] = Counter()
    launches = 0
    for event in profiled.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times[event.name[:60]] += event.device_time
            launches += 1
    return {
        "launches": launches,
        "busy_seconds": sum(times.values()) / 1e6,
        "kernels": [[name, time / 1000] for name, time in times.most_common(_TOP_KERNELS)],
        "waits": waits,
    }


def _sized(config: Config, batch: int, length: int) -> Config:
    """Return the configuration with one micro-batch of ``batch`` sequences of ``length`` tokens."""
    shape = dataclasses.replace(config.model.shape, block_size=length)
    train = dataclasses.replace(
        config.train, global_batch=batch, batch_size=batch, grad_accumulation=1, gpus=1
    )
    # The check reads values of the device.
    numerics = dataclasses.replace(config.numerics, check=False)
    model = dataclasses.replace(config.model, shape=shape)
    return dataclasses.replace(config, model=model, train=train, numerics=numerics)


def _tokens(config: Config, device: torch.device) -> Tensor:
    shape = config.model.shape
    size = (config.train.batch_size, shape.block_size + 1)
    return torch.randint(shape.vocab_size, size, device=device)


def parity_rows(config: Config, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the relative error of logits and gradients of every backend in every precision."""
    shape = dataclasses.replace(
        config.model.shape, n_layer=2, block_size=_PARITY_TOKENS, dropout=0.0
    )
    by_rows = dataclasses.replace(config.model.attention, backend="rows")
    model = GPT(dataclasses.replace(config.model, shape=shape, attention=by_rows)).double()
    fill_parameters(model)
    model.to(device)
    tokens = torch.randint(shape.vocab_size, (2, _PARITY_TOKENS), device=device)
    expected = _logits_and_gradient(model, tokens)
    state = model.state_dict()
    options, reads = config.model.attention, model.blocks[0].attn.reader is not None
    backends = ["auto", *BACKENDS]
    if options.terms or options.gates or reads:
        backends = ["rows"]
    if not unsupported_by_triton(options, shape):
        backends.append("triton")
    for backend in backends:
        for precision, dtype in DTYPES.items():
            attention = dataclasses.replace(options, backend=backend)
            other = GPT(dataclasses.replace(config.model, shape=shape, attention=attention))
            other.load_state_dict(state)
            machine = dataclasses.replace(config.machine, precision=precision, device=device.type)
            row: dict[str, Any] = {"backend": backend, "precision": precision}
            try:
                with autocast(machine):
                    actual = _logits_and_gradient(other.to(device), tokens)
            except (RuntimeError, ConfigError, RunError) as error:
                yield row | {"state": "ABSENT", "error": str(error).splitlines()[0]}
                continue
            errors = relative_errors(actual, expected)
            row["state"] = "PASS" if max(errors) <= TOLERANCES[dtype] else "FAIL"
            yield row | {"logits": errors[0], "gradient": errors[1]}


def loss_rows(config: Config, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the relative error of the loss and of its gradients, by backend and precision."""
    shape = config.model.shape
    sizes = (_PARITY_TOKENS, 1.0), (shape.padded_vocab_size, 0.1)
    drawn = [torch.randn(size, shape.n_embd, device=device) * scale for size, scale in sizes]
    targets_X = torch.randint(shape.vocab_size, (_PARITY_TOKENS,), device=device)
    # No block holds all tokens, so that they are divided into chunks.
    pieces = LogitsChunks(block_elements=1)

    def compute(inputs: Sequence[Tensor], backend: str) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in inputs]
        kernel = softmax_gradient(backend, device)
        loss = linear_cross_entropy(
            leaves[0], leaves[1], targets_X, shape.vocab_size, pieces, kernel
        )
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    for precision, dtype in DTYPES.items():
        inputs = [x.to(dtype) for x in drawn]
        expected = compute([x.double() for x in inputs], "torch")
        for backend in ("torch", "triton"):
            row: dict[str, Any] = {"backend": f"loss {backend}", "precision": precision}
            try:
                errors = relative_errors(compute(inputs, backend), expected)
            except (RuntimeError, RunError) as error:
                yield row | {"state": "ABSENT", "error": str(error).splitlines()[0]}
                continue
            row["state"] = "PASS" if max(errors) <= TOLERANCES[dtype] else "FAIL"
            yield row | {"logits": errors[0], "gradient": max(errors[1:])}


def _logits_and_gradient(model: GPT, tokens_BT: Tensor) -> tuple[Tensor, Tensor]:
    logits_BTV = model(tokens_BT)
    weights = torch.linspace(-1, 1, logits_BTV.shape[-1], device=logits_BTV.device)
    # A mean over the vocabulary would underflow in fp16.
    ((logits_BTV.float() * weights).square().sum() / len(tokens_BT)).backward()
    gradients = [p.grad.flatten() for p in model.parameters() if p.grad is not None]
    return logits_BTV.detach(), torch.cat(gradients)


class PlainGPT(nn.Module):
    """GPT-2 of torch's modules, as a plain training script would write it."""

    def __init__(self, layers: int, width: int, heads: int, context: int, vocab: int) -> None:
        super().__init__()
        self.heads = heads
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(context, width)
        parts = {"attn": (width, 3 * width), "proj": (width, width)}
        parts |= {"up": (width, 4 * width), "down": (4 * width, width)}
        self.blocks = nn.ModuleList(
            nn.ModuleDict(
                {name: nn.Linear(*size) for name, size in parts.items()}
                | {"ln_1": nn.LayerNorm(width), "ln_2": nn.LayerNorm(width)}
            )
            for _ in range(layers)
        )
        self.ln_f = nn.LayerNorm(width)
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """Return the mean loss of the next tokens of ``tokens_BT``, in nats."""
        x_BTC = self.wte(tokens_BT[:, :-1]) + self.wpe.weight[: tokens_BT.shape[1] - 1]
        for module in self.blocks:
            block = cast(nn.ModuleDict, module)
            qkv = block["attn"](block["ln_1"](x_BTC)).unflatten(-1, (3, self.heads, -1))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x_BTC = x_BTC + block["proj"](context.transpose(1, 2).flatten(-2))
            x_BTC = x_BTC + block["down"](F.gelu(block["up"](block["ln_2"](x_BTC))))
        logits_BTV = F.linear(self.ln_f(x_BTC), self.wte.weight)
        return F.cross_entropy(logits_BTV.flatten(0, 1), tokens_BT[:, 1:].flatten())


def plain_rows(config: Config, device: torch.device, batch: int) -> Iterator[dict[str, Any]]:
    """Yield step times of the plain loop and of the trainer's step, eager and compiled."""
    config = _sized(config, batch, config.model.shape.block_size)
    shape = dataclasses.replace(config.model.shape, dropout=0.0)
    model = dataclasses.replace(config.model, shape=shape)
    for compiled in (False, True):
        machine = dataclasses.replace(config.machine, compile=compiled)
        both = dataclasses.replace(config, model=model, machine=machine)
        for name, loop in (("plain", _plain_step), ("trainer", _trainer_step)):
            started = time.perf_counter()
            seconds = median_seconds(device, loop(both, device))
            yield {
                "loop": name,
                "compiled": compiled,
                "ms": 1000 * seconds,
                "tokens_per_second": batch * shape.block_size / seconds,
                "first_calls_seconds": time.perf_counter() - started - _STEPS * seconds,
            }


def _trainer_step(config: Config, device: torch.device) -> Callable[[], None]:
    training, tokens = MinimalTraining(config, device), _tokens(config, device)
    return lambda: training.step([tokens])


def _plain_step(config: Config, device: torch.device) -> Callable[[], None]:
    shape, tokens = config.model.shape, _tokens(config, device)
    sizes = shape.n_layer, shape.n_embd, shape.n_head, shape.block_size, shape.padded_vocab_size
    model = PlainGPT(*sizes).to(device)
    forward = cast(nn.Module, torch.compile(model)) if config.machine.compile else model
    adamw = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        with autocast(config.machine):
            loss = forward(tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        adamw.step()
        adamw.zero_grad(set_to_none=True)

    return step


def variants(name: str, config: Config, first: bool) -> Iterator[tuple[str, Config]]:
    """Yield the configuration, and other forms of it.

    The Triton kernels can compute the attention of the row engine. The first of a study is also
    timed without dropout, compiled, and with torch's loss.
    """
    yield name, config
    model = config.model
    attention, plain = model.attention, dataclasses.replace(model.shape, dropout=0.0)
    if first:
        changed = dataclasses.replace(config, model=dataclasses.replace(model, shape=plain))
        machine = dataclasses.replace(config.machine, compile=True)
        yield f"{name}, DROPOUT=0", changed
        yield f"{name}, DROPOUT=0, COMPILE", dataclasses.replace(changed, machine=machine)
        by_torch = dataclasses.replace(model, loss_backend="torch")
        yield f"{name}, loss by torch", dataclasses.replace(config, model=by_torch)
    shows = any(model.mlp.reads_weights(site) for site in model.sites())
    device = config.machine.device
    form = select_backend(attention, model.shape, shows, device)
    if form not in ("rows", "triton"):
        return
    other = "rows" if form == "triton" else "triton"
    if other == "rows" or not unsupported_by_triton(attention, model.shape):
        by_other = dataclasses.replace(attention, backend=other)
        varied = dataclasses.replace(model, attention=by_other)
        yield f"{name}, {other}", dataclasses.replace(config, model=varied)


def steps(named: list[tuple[str, Config]], device: torch.device, seconds: float) -> None:
    """Print the rates, then a row for each configuration until ``seconds`` have passed."""
    ends = time.monotonic() + seconds
    gpu = local_gpu()
    rates = device_rates(named[0][1], device)
    _print({"device": device_name(device), "rates": dataclasses.asdict(rates)})
    for index, (name, config) in enumerate(named):
        for label, variant in variants(name, config, first=index == 0):
            if time.monotonic() > ends:
                _print({"step": label, "error": f"not measured, {seconds:.0f} s were used"})
                continue
            try:
                _print({"step": label, **step_row(variant, device, rates, gpu)})
            except (RuntimeError, ConfigError, RunError) as error:
                _print({"step": label, "error": str(error).splitlines()[0][:90]})


def _print(row: dict[str, Any]) -> None:
    finite = {
        k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
    }
    sys.stdout.write(json.dumps(finite) + "\n")
    sys.stdout.flush()


def main() -> int:
    """Run one measurement on the configurations of stdin, a JSON object of name → values."""
    subject, *args = sys.argv[1:]
    named = [(name, Config.from_values(v)) for name, v in json.load(sys.stdin).items()]
    device = set_up(named[0][1].machine, current_process(), named[0][1].train.gpus)
    if subject == "steps":
        steps(named, device, float(args[0]))
        return EXIT_DONE
    if subject == "plain":
        for row in plain_rows(named[0][1], device, int(args[0])):
            _print(row)
        return EXIT_DONE
    torch.set_float32_matmul_precision("highest")
    failed = False
    # The loss is the same for every step.
    parts = [("", loss_rows(named[0][1], device))]
    parts += [(name, parity_rows(config, device)) for name, config in named]
    for name, rows in parts:
        for row in rows:
            _print({"step": name, **row})
            failed |= row["state"] == "FAIL"
    return EXIT_FAILED if failed else EXIT_DONE


if __name__ == "__main__":
    sys.exit(main())
