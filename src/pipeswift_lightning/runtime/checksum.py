"""Checksums: whether a file still holds what was written, which its size alone does not tell.

CRC-32 finds what disks, networks and memory do to a file; it is no protection against a forger. It
takes about a second for some GB, without Python's lock, so a save's thread computes it beside the
training. A file is read again for it right after it was written, when its pages are still cached.
"""

import json
import zlib
from collections.abc import Mapping
from heapq import heapify, heapreplace
from pathlib import Path
from typing import Any

__all__ = ["checksum", "description_checksum", "file_checksum", "shares"]

_CHUNK_BYTES = 1 << 22


def checksum(content: bytes) -> str:
    """Return the checksum of some bytes.

    Example:
        >>> checksum(b"pipe")
        '1f9a630e'
    """
    return f"{zlib.crc32(content):08x}"


def file_checksum(path: Path) -> str:
    """Return the checksum of a file, read piece by piece."""
    total, piece = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while length := file.readinto(piece):
            total = zlib.crc32(piece[:length], total)
    return f"{total:08x}"


def description_checksum(description: Mapping[str, Any]) -> str:
    """Return the checksum of what a JSON file says, however it is laid out."""
    return checksum(json.dumps(description, sort_keys=True).encode())


def shares(sizes: Mapping[str, int], num_ranks: int) -> list[list[str]]:
    """Divide files among ranks, so that all read about as many bytes.

    Example:
        >>> shares({"a": 9, "b": 5, "c": 5, "d": 1}, 2)
        [['a', 'd'], ['b', 'c']]
    """
    files: list[list[str]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    heapify(loads)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        load, rank = loads[0]
        files[rank].append(name)
        heapreplace(loads, (load + sizes[name], rank))
    return files
