"""The events of a file together with the text that they were decoded from, as a stream."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hvdkit.read.timeline.model import TimelineEvent
from hvdkit.read.timeline.reader import decode_one, open_file, pieces

_EVENTS = msgspec.json.Decoder(list[TimelineEvent])
_TEXTS = msgspec.json.Decoder(list[msgspec.Raw])
_UNREADABLE = (ValueError, RecursionError)  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors

Pair = tuple[TimelineEvent, bytes]


def raw_events(path: Path) -> Iterator[Pair]:
    """Every event that can be read, in the order of the file, and its JSON text without the commas around it.

    Args:
        path: a timeline, as it is or compressed with gzip; what is damaged is left out, as by ``read``.
    """
    with open_file(path) as file:
        for pairs in pieces(file, Counter(), _decode, _decode_one):
            yield from pairs


def _decode(piece: bytes) -> list[Pair] | None:
    text = b"[" + piece.strip(b" \t\r\n,[") + b"]"
    try:
        text.decode()
        return list(zip(_EVENTS.decode(text), map(bytes, _TEXTS.decode(text)), strict=True))
    except _UNREADABLE:
        return None


def _decode_one(text: bytes) -> Pair | None:
    event = decode_one(text)
    return None if event is None else (event, text.decode("utf-8", "replace").encode())
