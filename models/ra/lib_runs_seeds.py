"""Named random streams: one seed per purpose, derived from the seed of the run.

Separate streams keep uses of randomness independent: adding a mechanism draws more initial weights
but does not change the order of the data.
"""

import hashlib


def stream_seed(seed: int, stream: str) -> int:
    """Return a 63-bit seed for ``stream`` (``init``, ``dropout``, ``data`` …) of a run with
    ``seed``.

    The seed is taken from SHA-256 of both, so that adjacent seeds give unrelated streams.
    """
    digest = hashlib.sha256(f"{seed}:{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1


def initial_weights_stream(parameter: str, number: int = 0) -> str:
    """Return the name of the stream of a parameter's initial weights.

    A ``number`` other than 0 selects other initial weights; no other stream depends on it.
    """
    return f"init-{number}/{parameter}" if number else f"init/{parameter}"
