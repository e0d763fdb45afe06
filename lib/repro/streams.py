"""Named random streams: one seed per purpose, derived from the run's seed.

A stream per purpose keeps one use of randomness from shifting another: adding a mechanism draws
more initial weights without changing the order of the data.
"""

import hashlib


def stream_seed(seed: int, stream: str) -> int:
    """A 63-bit seed for ``stream`` (``init``, ``dropout``, ``data`` …) of the run's ``seed``.

    SHA-256 of both, so that neighbouring seeds give unrelated streams.
    """
    digest = hashlib.sha256(f"{seed}:{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
