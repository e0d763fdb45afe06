"""W&B's offline file is complete exactly at the end of a record."""

import struct
from pathlib import Path

BLOCK, HEAD = 32768, 7
WHOLE, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def is_complete(path: Path) -> bool:
    """Return whether a log is complete; import W&B here, which takes a second."""
    from lib.tracking.wandb_tracker import is_complete_log

    return is_complete_log(path)


def log(*records: int) -> tuple[bytes, set[int]]:
    """Return a LevelDB log of records with these lengths, and the end offset of each record."""
    data, ends = bytearray(b":W&B\xe1\xbe\x00"), set()
    for length in records:
        remaining, started = length, False
        while True:
            room = BLOCK - len(data) % BLOCK
            if room < HEAD:
                data += bytes(room)
                room = BLOCK
            part = min(remaining, room - HEAD)
            remaining -= part
            kind = {(False, True): WHOLE, (False, False): FIRST, (True, True): LAST}
            chunk = kind.get((started, remaining == 0), MIDDLE)
            data += struct.pack("<IHB", 0, part, chunk) + b"\x07" * part
            started = True
            if not remaining:
                break
        ends.add(len(data))
    return bytes(data), ends


def test_a_cut_is_noticed_wherever_it_is(tmp_path: Path) -> None:
    data, ends = log(100, 300, 40_000, 5, 70_000, 25_000, 9)
    assert len(data) > 4 * BLOCK
    near = {end + shift for end in ends for shift in range(-9, 10)}
    pages = {*range(4096, len(data), 4096)}
    path = tmp_path / "run.wandb"
    for cut in sorted(size for size in near | pages if HEAD < size <= len(data)):
        path.write_bytes(data[:cut])
        assert is_complete(path) is (cut in ends), cut


def test_nothing_is_not_whole(tmp_path: Path) -> None:
    for content in (b"", b":W&B\xe1\xbe\x00", b":W"):
        (tmp_path / "run.wandb").write_bytes(content)
        assert not is_complete(tmp_path / "run.wandb")
