"""What is seen of a job: its ranks' output, what its launcher writes about itself, and last words."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence

from hvdkit.run.launch.outcome import RankEnd
from hvdkit.run.launch.output import TaggedOutput
from hvdkit.run.launch.peer import Peer
from hvdkit.run.launch.tracebacks import last_words

STDOUT, STDERR = 1, 2
START_UP = re.compile(
    rb"WARNING: All log messages before absl::InitializeLog\(\) is called are written to STDERR|"
    rb"I0000 00:00:[\d.]+ +\d+ \w+\.cc:\d+\] |"
    rb"To enable the following instructions: .* rebuild TensorFlow"
)
"""What TensorFlow's C++ writes on every rank before its log is set up, whatever TF_CPP_MIN_LOG_LEVEL is."""


class JobOutput:
    """Everything that a job writes goes through here, as long as somebody reads it.

    Args:
        launcher: its name, for the tag of what it writes itself.
        tagged: put ``[rank] `` before each line.
        verbose: show START_UP, too.
        give_up: asked while a reader takes nothing: True to wait no longer for it.
        on_unread: called once when nobody reads any more.
    Attributes:
        unread: nobody reads any more; what comes is dropped.
        held: what the launcher wrote and is not to be seen yet: after a failure it only repeats at length what the last
            line of this program says, and some launchers chatter before the ranks run.
    """

    def __init__(
        self,
        launcher: str,
        *,
        tagged: bool,
        verbose: bool,
        give_up: Callable[[], bool],
        on_unread: Callable[[], None],
    ) -> None:
        self.unread = False
        self.held = bytearray()
        self._launcher = launcher
        self._tagged, self._verbose = tagged, verbose
        self._output = TaggedOutput(tagged, give_up)
        self._on_unread = on_unread
        self._last_writer: tuple[str, int] | None = None  # source, descriptor

    def show(self, source: object, fd: int, data: bytes) -> None:
        """Write the next bytes of a rank or of the launcher, whole lines at a time."""
        self._write(self._output.feed, str(source), fd, data)
        if data:
            self._last_writer = (str(source), fd)

    def errors(self, peer: Peer, lines: Sequence[bytes]) -> None:
        """Write lines of a rank's standard error."""
        for line in lines:
            if self._verbose or not START_UP.match(line):
                self.show(peer.rank, STDERR, line)

    def end_of(self, source: object) -> None:
        """Write what is left of a rank or of the launcher, a last line without its end."""
        for fd in (STDOUT, STDERR):
            self._write(self._output.close, str(source), fd)

    def release_launcher(self) -> None:
        """Write what was held of the launcher."""
        self.show(self._launcher, STDERR, bytes(self.held))
        self.held.clear()

    def launcher_at_end(self) -> None:
        """Write what was held of the launcher, down to a last line without its end."""
        self.release_launcher()
        self.end_of(self._launcher)

    def tracebacks(self, ranks: Sequence[Peer], failure: RankEnd | None) -> None:
        """Write the tracebacks that are held back, that of the failure last."""
        errors = {peer.rank: peer.errors for peer in ranks if peer.rank is not None}
        culprit = None if failure is None else failure.rank
        for rank, text in last_words(errors, culprit, self._last_writer, self._tagged):
            self.show(rank, STDERR, text)

    def say(self, sentence: str) -> None:
        """Write a line of this program itself."""
        if not self.unread:
            with contextlib.suppress(BrokenPipeError):
                self._output.say(STDERR, f"hvdkit launch: {sentence}")

    def _write(self, write: Callable[..., None], *what: object) -> None:
        if self.unread:
            return
        try:
            write(*what)
        except BrokenPipeError:
            self.unread = True
            self._on_unread()
