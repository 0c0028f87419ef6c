"""The ring, step by step: every rank sends to its right neighbour and receives from its left one, nothing else.

An allreduce of S bytes over n ranks is a reduce-scatter and an all-gather, each of n - 1 steps with S/n bytes: every
rank sends and receives 2 (n-1)/n S, the least that is possible. The array is divided into n chunks, each chunk into
segments; a segment is sent on as soon as it has come and was added, so that the link is busy while ranks add, and
only the first segment of a job waits.

Source: Patarasuk and Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, Journal of Parallel
    and Distributed Computing 69 (2009).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.measure.emulate.check import ROOT

SEGMENT_BYTES = 512 * 1024
"""Segments of this size, or a little less: large enough to fill the link, small enough for several in flight."""
_AHEAD = 8
"""Receives that are posted before they are needed."""
RingRequest = Callable[[], object]
"""A message on its way: returns when it has come, or when its buffer is free again."""


@dataclass
class RingTransport:
    """Point-to-point messages; those from one rank to another come in the order in which they were sent.

    Attributes:
        rank, size: of this process.
        send: sends an array, which must not change until the request is done, to a rank.
        receive: fills an array, which must not be touched until the request is done, from a rank.
    """

    rank: int
    size: int
    send: Callable[[NDArray[Any], int], RingRequest]
    receive: Callable[[NDArray[Any], int], RingRequest]


def broadcast(transport: RingTransport, array: NDArray[Any]) -> None:
    """Bring the root's array to all ranks, in place: along the ring, segment by segment, but not back to the root."""
    size, position = transport.size, (transport.rank - ROOT) % transport.size
    right, left = (transport.rank + 1) % size, (transport.rank - 1) % size
    segments = np.array_split(array, max(1, -(-array.nbytes // SEGMENT_BYTES)))
    coming = [transport.receive(segment, left) for segment in segments] if position > 0 else []
    sent = []
    for index, segment in enumerate(segments):
        if coming:
            coming[index]()
        if position < size - 1:
            sent.append(transport.send(segment, right))
    for request in sent:
        request()


def allreduce(transport: RingTransport, array: NDArray[Any]) -> None:
    """Add the arrays of all ranks, in place, both halves as one stream of segments.

    In step s of 2n - 2 rank r sends chunk r - s and receives r - s - 1. What comes in the first n - 1 steps is added to
    the chunk, what comes later takes its place. What came in a step is sent in the next one.

    Args:
        transport: to the neighbours.
        array: shape (elements,), any number of elements, the same on every rank.
    """
    rank, size = transport.rank, transport.size
    steps = 2 * size - 2
    if steps == 0:
        return
    right, left = (rank + 1) % size, (rank - 1) % size
    chunks = np.array_split(array, size)  # views, of which the first ones may have an element more
    parts = max(1, -(-chunks[0].nbytes // SEGMENT_BYTES))
    segments = [np.array_split(chunk, parts) for chunk in chunks]
    # No further ahead than a step: a receive must not be posted into a segment that is still to be sent.
    ahead = min(_AHEAD, parts)
    scratch = [np.empty(len(segments[0][0]), array.dtype) for _ in range(ahead)]
    sent: dict[tuple[int, int], RingRequest] = {}

    def send(step: int, part: int) -> None:
        chunk = (rank - step) % size
        sent[chunk, part] = transport.send(segments[chunk][part], right)

    def receive(number: int) -> tuple[RingRequest, NDArray[Any]]:
        """Post a receive: into scratch where it is to be added, else in place, once nothing is sent from there."""
        step, part = tasks[number]
        chunk = (rank - step - 1) % size
        into = segments[chunk][part]
        if step < size - 1:
            into = scratch[number % ahead][: len(into)]
        elif (before := sent.pop((chunk, part), None)) is not None:
            before()
        return transport.receive(into, left), into

    for part in range(parts):
        send(0, part)
    tasks = [(step, part) for step in range(steps) for part in range(parts)]
    posted: deque[tuple[RingRequest, NDArray[Any]]] = deque()
    for number, (step, part) in enumerate(tasks):
        while len(posted) < ahead and number + len(posted) < len(tasks):
            posted.append(receive(number + len(posted)))
        request, came = posted.popleft()
        request()
        if step < size - 1:
            segment = segments[(rank - step - 1) % size][part]
            np.add(segment, came, out=segment)
        if step + 1 < steps:
            send(step + 1, part)
    for request in sent.values():
        request()
