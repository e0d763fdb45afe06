"""Named random streams: one seed per purpose, so that uses of randomness are independent.

Adding a mechanism draws more initial weights but does not change the order of the data.
"""

import hashlib


def stream_seed(seed: int, stream: str) -> int:
    """Return a 63-bit seed for the stream of one purpose in a run with ``seed``.

    From SHA-256 of both, so that adjacent seeds give unrelated streams.
    """
    digest = hashlib.sha256(f"{seed}:{stream}".encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
