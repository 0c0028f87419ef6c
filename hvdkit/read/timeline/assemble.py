"""From events to operations: pairs begins with ends, per tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from msgspec.structs import replace

from hvdkit.read.timeline.model import CycleMark, Operation, Phase, TimelineEvent, parse_shape, size_in_bytes

LATEST = 1e17
"""Microseconds (three thousand years) past which a time is damage."""

_NO_START = 6e8
"""Microseconds: no recording has its first event so long after its beginning."""


class _Open:
    """What is known of the operation of one tensor that has not ended yet."""

    __slots__ = ("negotiate_end", "negotiate_start", "negotiated", "phases", "stack", "ticks")

    def __init__(self) -> None:
        self.stack: list[tuple[str, float]] = []
        self.clear()

    def clear(self) -> None:
        self.negotiated = ""
        self.negotiate_start: float | None = None
        self.negotiate_end: float | None = None
        self.ticks: dict[int, float] = {}
        self.phases: list[Phase] = []


class Assembler:
    """Takes events in the order of the file and gives back the operations that they complete."""

    def __init__(self) -> None:
        """Starts without any event."""
        self.names: dict[int, str] = {}
        self.dropped: Counter[str] = Counter()
        self.start_time_since_epoch: int | None = None
        self._origin: float | None = None
        self._open: dict[int, _Open] = {}
        self._shapes: dict[tuple[str, str], tuple[tuple[int, ...] | None, int | None]] = {}

    def add(self, events: Sequence[TimelineEvent]) -> list[Operation | CycleMark]:
        """The operations that end and the cycles that start in these events."""
        done: list[Operation | CycleMark] = []
        events = self._from_the_start(events)
        opened, dropped = self._open, self.dropped
        new_tuple = tuple.__new__  # a third of the time of Phase(...), of which there are millions
        for event in events:
            ph, ts = event.ph, event.ts
            state = opened.get(event.pid)
            if not 0 <= ts < LATEST:
                if ph == "M":
                    self._name(event)
                else:
                    dropped["no time"] += 1
            elif ph == "B":
                if state is None:
                    state = opened[event.pid] = _Open()
                name, stack = event.name, state.stack
                if name[:10] == "NEGOTIATE_":
                    self._negotiate(name[10:], ts, state)
                elif stack and stack[0][0][:10] == "NEGOTIATE_":
                    dropped["begin without an end"] += len(stack)
                    stack.clear()
                stack.append((name, ts))
            elif ph == "E":
                if state is None or not (stack := state.stack):
                    dropped["end without a begin"] += 1
                    continue
                name, start = stack.pop()
                if stack and ts >= start:
                    state.phases.append(new_tuple(Phase, (name, start, ts)))
                elif (operation := self._end(event, state, name, start)) is not None:
                    done.append(operation)
            elif ph == "X":
                self._tick(event, state)
            elif event.name == "CYCLE_START":
                done.append(CycleMark(ts))
            elif ph == "M":
                self._name(event)
            else:
                dropped["unknown event"] += 1
        return done

    def _from_the_start(self, events: Sequence[TimelineEvent]) -> Sequence[TimelineEvent]:
        """Events of an old Horovod, which does not write when it began and counts from the start of the machine."""
        if self._origin is None:
            self._origin = next((event.ts for event in events if event.ph != "M" and 0 <= event.ts < LATEST), None)
            said = any(event.args and event.args.start_time_since_epoch_in_micros is not None for event in events)
            if self._origin is not None and (said or self._origin < _NO_START):
                self._origin = 0.0
        if not self._origin:
            return events
        return [replace(event, ts=event.ts - self._origin) if event.ph != "M" else event for event in events]

    def finish(self) -> None:
        """Counts what is still open, as that of a job that was killed."""
        for state in self._open.values():
            begun = len(state.stack) or (1 if state.negotiated else 0)
            if begun:
                self.dropped["operation not finished at the end"] += 1
            state.stack.clear()
            state.clear()

    def _negotiate(self, kind: str, ts: float, state: _Open) -> None:
        """Starts a new operation; what an earlier one left open has lost its end."""
        left = len(state.stack) or (1 if state.negotiated else 0)
        if left:
            self.dropped["begin without an end"] += left
            state.stack.clear()
            state.clear()
        state.negotiated, state.negotiate_start = kind, ts

    def _end(self, event: TimelineEvent, state: _Open, name: str, start: float) -> Operation | None:
        if event.ts < start:
            self.dropped["ends before it begins"] += 1
            if not state.stack:
                state.clear()
        elif name.startswith("NEGOTIATE_"):
            state.negotiate_end = event.ts
        else:
            return self._operation(event, state, name, start)
        return None

    def _operation(self, event: TimelineEvent, state: _Open, kind: str, start: float) -> Operation:
        """The operation that this event ends, of what is open on its tensor; clears that."""
        args = event.args
        dtype = args.dtype if args else ""
        shape, size = self._shape(dtype, args.shape) if args else (None, None)
        tensor = self.names.get(event.pid) or f"pid {event.pid}"
        if state.negotiated != kind:
            state.negotiate_start = state.negotiate_end = None
        operation = Operation(
            tensor,
            kind,
            start,
            event.ts,
            state.negotiate_start,
            state.negotiate_end,
            state.ticks,
            state.phases,
            dtype,
            shape,
            size,
        )
        state.clear()
        return operation

    def _shape(self, dtype: str, text: str) -> tuple[tuple[int, ...] | None, int | None]:
        found = self._shapes.get((dtype, text))
        if found is None:
            if len(self._shapes) > 10_000:
                self._shapes.clear()
            shape = parse_shape(text)
            found = self._shapes[dtype, text] = (shape, size_in_bytes(dtype, shape))
        return found

    def _tick(self, event: TimelineEvent, state: _Open | None) -> None:
        if state is None or not state.stack or not (event.name.isascii() and event.name.isdecimal()):
            self.dropped["unknown event"] += 1
        elif len(event.name) < 10:
            state.ticks[int(event.name)] = event.ts

    def _name(self, event: TimelineEvent) -> None:
        args = event.args
        if event.name == "process_name" and args is not None:
            if (start := args.start_time_since_epoch_in_micros) is not None:
                self.start_time_since_epoch = start if 0 <= start <= LATEST else None
            else:
                self.names[event.pid] = args.name
