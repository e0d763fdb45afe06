"""Generated text: decoding with caches, sampling, and the end of the context.

T tokens, V vocabulary.
"""

import itertools
import math

import torch
from torch import Tensor

from gpt2.check.cases import CheckFinding
from gpt2.check.subject import StepUnderTest
from gpt2.generate import SamplingOptions, generate

_DECODE_TOLERANCE = 1e-9
# The last tokens, of which all but two are decoded one at a time.
_SINGLE = 12
# Probabilities in fp32 against float64.
_PROBABILITY_TOLERANCE = 1e-5


def check_decode(subject: StepUnderTest) -> list[CheckFinding]:
    """Decode in float64: a prompt, single tokens beyond every window, several tokens at once."""
    model, idx_BT = subject.model, subject.tokens(2)
    length = idx_BT.size(1)
    single = range(max(length // 2, length - _SINGLE) + 1, length - 2)
    ends = sorted({length // 2, single.start - 1, *single, length})
    with torch.no_grad():
        expected_BTV = model(idx_BT)
        cache, start = model.new_cache(), 0
        for end in ends:
            decoded_BTV = model.decode(idx_BT[:, start:end], cache)
            error_T = (decoded_BTV - expected_BTV[:, start:end]).abs().amax((0, 2))
            wrong = ~(error_T <= _DECODE_TOLERANCE * float(expected_BTV.abs().max()))
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                text = f"differ by {float(error_T[first]):.1e}, {end - start} token(s) at a time"
                expected = f"logits at {start + first} as without a cache"
                return [CheckFinding("cached-logits", expected, text)]
            start = end
    shared = subject.context.shared_findings
    # Sampling does not depend on the model: one row of logits is enough for all steps.
    if _SAMPLING_FINDINGS not in shared:
        shared[_SAMPLING_FINDINGS] = _sampling(expected_BTV[0, -1])
    return [*shared[_SAMPLING_FINDINGS], *_generated(subject)]


# Options of sampling, and draws of each: a token of probability 0.5 is missed once in 2^60.
_SAMPLING = (
    SamplingOptions(),
    SamplingOptions(temperature=0.5, top_k=3),
    SamplingOptions(temperature=2.0, top_p=0.6),
    SamplingOptions(temperature=0.0),
)
_DRAWS = 60
_SAMPLING_FINDINGS = "decode/sampling"
# Half of them within the context.
_GENERATED = 4


def _sampling(logits_V: Tensor) -> list[CheckFinding]:
    """Check the distribution of sampled tokens, and that draws follow it."""
    findings = []
    for options in _SAMPLING:
        expected_V = _token_probabilities(logits_V, options)
        generator = torch.Generator().manual_seed(0)
        tokens = {options.draw(logits_V.float(), generator) for _ in range(_DRAWS)}
        impossible = [token for token in tokens if expected_V[token] == 0]
        single = len(tokens) == 1 and float(expected_V.max()) < 0.5
        if impossible or single:
            text = f"{_DRAWS} draws gave the tokens {sorted(tokens)[:6]}"
            findings.append(CheckFinding("sampled-tokens", f"tokens of {options}", text))
        if options.temperature == 0:
            continue
        error = float((options.distribution(logits_V.float()) - expected_V).abs().max())
        if not error <= _PROBABILITY_TOLERANCE:
            text = f"probabilities differ by {error:.1e}"
            findings.append(CheckFinding("token-probability", f"probabilities of {options}", text))
    return findings


class _RecordedLogits(SamplingOptions):
    """Greedy decoding that keeps the logits of every token."""

    def __init__(self) -> None:
        super().__init__(temperature=0.0)
        object.__setattr__(self, "logits", [])

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Keep the logits and return the most likely token."""
        vars(self)["logits"].append(logits_V)
        return int(logits_V.argmax())


def _generated(subject: StepUnderTest) -> list[CheckFinding]:
    """Check the logits of text beyond the context, and that generation changes nothing else."""
    model, machine = subject.model, subject.small_exact.machine
    context = subject.small_exact.model.shape.block_size
    ids = subject.tokens(1)[0, : context - _GENERATED // 2].tolist()
    recorded, random_state = _RecordedLogits(), torch.get_rng_state()
    modes: set[bool] = set()
    hook = model.wte.register_forward_hook(lambda *given: modes.add(model.training))
    model.train()
    text = generate(model, torch.tensor(ids), 0, machine, recorded)
    tokens = list(itertools.islice(text, _GENERATED))
    same_mode = model.training
    model.eval()
    hook.remove()
    findings = []
    if modes != {False}:
        what = "generated text from the model in evaluation mode, without dropout"
        findings.append(CheckFinding("generation-mode", what, "training mode"))
    if not same_mode or not torch.equal(torch.get_rng_state(), random_state):
        expected = "the mode and the generators of training after generated text"
        found = "another random state" if same_mode else "evaluation mode"
        findings.append(CheckFinding("generation-side-effect", expected, found))
    ends = range(len(ids), len(ids) + _GENERATED)
    ids += tokens
    # Whole contexts: that of a token within the first context continues after it.
    contexts = [ids[max(0, end - context) : max(end, context)] for end in ends]
    with torch.no_grad():
        expected_BTV = model(torch.tensor(contexts))
    for i, (end, logits_V) in enumerate(zip(ends, vars(recorded)["logits"], strict=True), 1):
        expected_V = expected_BTV[i - 1, min(end, context) - 1]
        error = float((logits_V - expected_V).abs().max())
        if not error <= _DECODE_TOLERANCE * float(expected_V.abs().max()):
            what = f"logits of generated token {i} as those of a full pass"
            return [*findings, CheckFinding("generated-logits", what, f"differ by {error:.1e}")]
    return findings


def _token_probabilities(logits_V: Tensor, options: SamplingOptions) -> Tensor:
    """Return the probability of every token in float64: temperature, then top-k, then top-p."""
    logits = logits_V.double().tolist()
    order = sorted(range(len(logits)), key=lambda token: (-logits[token], token))
    if options.temperature == 0:
        kept, weights = order[:1], {order[0]: 1.0}
    else:
        highest = logits[order[0]]
        weights = {t: math.exp((logits[t] - highest) / options.temperature) for t in order}
        kept = order[: options.top_k or len(order)]
        total, before, nucleus = sum(weights[t] for t in kept), 0.0, []
        for token in kept:
            if before / total < options.top_p:
                nucleus.append(token)
            before += weights[token]
        kept = nucleus
    probabilities_V = torch.zeros_like(logits_V, dtype=torch.float64)
    total = sum(weights[t] for t in kept)
    for token in kept:
        probabilities_V[token] = weights[token] / total
    return probabilities_V
