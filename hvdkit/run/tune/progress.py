"""Progress on standard error."""

from __future__ import annotations

from rich.console import Console

from hvdkit.run.launch.tuned import Tuned
from hvdkit.run.trials.space import label
from hvdkit.run.tune.search import SearchWatcher


class ShownSearch(SearchWatcher):
    """Tells what happens, line by line, and on a terminal also what is running now."""

    def __init__(self, console: Console, jobs: int) -> None:
        self._console = console
        self._jobs = jobs
        self._status = console.status("starting")
        self._stage = ""

    def __enter__(self) -> ShownSearch:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._status.stop()

    def begins(self, stage: str, setting: Tuned, job: int) -> None:
        """Show the job that runs now on a terminal; elsewhere, such as in a log, a line for each round."""
        if self._console.is_terminal:
            self._status.update(f"job {job} of at most {self._jobs}: {label(setting)} ({stage})")
        elif stage != self._stage:
            self.says(f"{stage}; job {job} of at most {self._jobs}")
        self._stage = stage

    def says(self, sentence: str) -> None:
        """Print a line."""
        self._console.print(f"hvdkit tune: {sentence}", soft_wrap=True)
