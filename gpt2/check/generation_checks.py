"""Generated text: decoding with caches, and the end of the context."""

import itertools
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gpt2.check.finding import CheckFinding, expect, within
from gpt2.check.subject import StepUnderTest, relative_error
from gpt2.generate import SamplingOptions, generate

_DECODE_TOLERANCE = 1e-9
# The last tokens, of which all but two are decoded one at a time.
_SINGLE = 12


@torch.no_grad()
def check_decode(subject: StepUnderTest) -> list[CheckFinding]:
    """Decode in float64: a prompt, single tokens beyond every window, several tokens at once."""
    model, idx_BT = subject.model, subject.tokens(2)
    length = idx_BT.size(1)
    single = range(max(length // 2, length - _SINGLE) + 1, length - 2)
    ends = sorted({length // 2, single.start - 1, *single, length})
    expected_BTV = model(idx_BT)
    cache, findings = model.new_cache(), list[CheckFinding]()
    for start, end in itertools.pairwise([0, *ends]):
        error = relative_error(
            model.decode(idx_BT[:, start:end], cache), expected_BTV[:, start:end]
        )
        expected = f"logits at {start} as without a cache, {end - start} token(s) at a time"
        findings += within("cached-logits", expected, error, _DECODE_TOLERANCE)
    return findings[:1] or _generated(subject)


# Half of them within the context.
_GENERATED = 4


@dataclass(frozen=True)
class _RecordedLogits(SamplingOptions):
    """Greedy decoding that keeps the logits of every token."""

    logits: list[Tensor] = field(default_factory=list)

    def draw(self, logits_V: Tensor, generator: torch.Generator) -> int:
        """Keep the logits and return the most likely token."""
        self.logits.append(logits_V)
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
    ends = range(len(ids), len(ids) + _GENERATED)
    ids += itertools.islice(text, _GENERATED)
    same = model.training and torch.equal(torch.get_rng_state(), random_state)
    found = "another random state" if model.training else "evaluation mode"
    model.eval()
    hook.remove()
    what = "generated text from the model in evaluation mode, without dropout"
    findings = expect(modes == {False}, "generation-mode", what, "training mode")
    what = "the mode and the generators of training after generated text"
    findings += expect(same, "generation-side-effect", what, found)
    # Whole contexts: that of a token within the first context continues after it.
    contexts = [ids[max(0, end - context) : max(end, context)] for end in ends]
    with torch.no_grad():
        expected_BTV = model(torch.tensor(contexts))
    for i, (end, logits_V) in enumerate(zip(ends, recorded.logits, strict=True)):
        error = relative_error(logits_V, expected_BTV[i, min(end, context) - 1])
        what = f"logits of generated token {i + 1} as those of a full pass"
        findings += within("generated-logits", what, error, _DECODE_TOLERANCE)
    return findings
