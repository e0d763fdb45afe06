"""Decoding with the KV cache gives the same logits as the full forward pass.

B batch, T tokens, V vocabulary.
"""

import torch

from gpt2.check.finding import Finding
from gpt2.check.subject import Subject

_TOLERANCE = 1e-9


def check(subject: Subject) -> list[Finding]:
    """Decode in float64: a prompt, single tokens beyond every window, several tokens at once."""
    model, idx_BT = subject.model, subject.tokens(2)
    length = idx_BT.size(1)
    ends = sorted({length // 2, *range(length // 2 + 1, length - 2), length})
    with torch.no_grad():
        expected_BTV = model(idx_BT)
        cache, start = model.new_cache(), 0
        for end in ends:
            decoded_BTV = model.decode(idx_BT[:, start:end], cache)
            error_T = (decoded_BTV - expected_BTV[:, start:end]).abs().amax((0, 2))
            wrong = ~(error_T <= _TOLERANCE * float(expected_BTV.abs().max()))
            if bool(wrong.any()):
                first = int(wrong.nonzero()[0])
                text = f"differ by {float(error_T[first]):.1e}, {end - start} token(s) at a time"
                expected = f"logits at {start + first} as without a cache"
                return [Finding("cached-logits", expected, text)]
            start = end
    return []
