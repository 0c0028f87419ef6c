"""The events of a file together with the text that they were decoded from, as a stream."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from hvdkit.read.timeline.reader import (
    LONGEST_EVENT,
    LONGEST_GAP,
    OBJECT,
    PIECE,
    TRIES,
    Event,
    boundaries,
    decode_one,
    open_file,
)

_EVENTS = msgspec.json.Decoder(list[Event])
_TEXTS = msgspec.json.Decoder(list[msgspec.Raw])
_UNREADABLE = (ValueError, RecursionError)  # msgspec.DecodeError and UnicodeDecodeError are ValueErrors

Pair = tuple[Event, bytes]


def raw_events(path: Path) -> Iterator[Pair]:
    """Every event that can be read, in the order of the file, and its JSON text without the commas around it.

    Args:
        path: a timeline, as it is or compressed with gzip; what is damaged is left out, as by ``read``.
    """
    with open_file(path) as file:
        rest, gap = b"", 0
        while gap <= LONGEST_GAP:
            try:
                read = file.read(PIECE)
            except (EOFError, OSError, zlib.error):
                read = b""
            piece = rest + read
            if not read:
                yield from _decode(piece) or _decode(piece.rstrip(b" \t\r\n]")) or _decode_singly(piece)
                return
            pairs, cut = _decode_most(piece)
            rest = piece[cut:]
            gap = 0 if pairs else gap + len(read)
            yield from pairs


def _decode_most(piece: bytes) -> tuple[list[Pair], int]:
    """The events of a piece up to one that may be incomplete, and where that starts."""
    cuts = list(islice(boundaries(piece), TRIES))
    for cut in cuts:
        if (pairs := _decode(piece[:cut])) is not None:
            return pairs, cut
    last = cuts[0] if cuts else max(0, len(piece) - LONGEST_EVENT)
    return list(_decode_singly(piece[:last])), last


def _decode(piece: bytes) -> list[Pair] | None:
    """All events of a piece; None if something in it is not one."""
    text = b"[" + piece.strip(b" \t\r\n,[") + b"]"
    try:
        text.decode()
        return list(zip(_EVENTS.decode(text), map(bytes, _TEXTS.decode(text)), strict=True))
    except _UNREADABLE:
        return None


def _decode_singly(piece: bytes) -> Iterator[Pair]:
    """The events of a damaged piece that are whole."""
    position = 0
    while (match := OBJECT.search(piece, position)) is not None:
        event = decode_one(match.group())
        position = match.start() + 1 if event is None else match.end()
        if event is not None:
            yield event, match.group().decode("utf-8", "replace").encode()
