"""Generated text: decoding with caches, and the end of the context."""

import itertools

import torch
from torch import Tensor

from gpt2.check.finding import CheckFinding
from gpt2.check.subject import StepUnderTest
from gpt2.generate import SamplingOptions, generate

_DECODE_TOLERANCE = 1e-9
# The last tokens, of which all but two are decoded one at a time.
_SINGLE = 12


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
    return _generated(subject)


# Half of them within the context.
_GENERATED = 4


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
