"""A machine on which jobs are only numbers: their ranks write steps of known length, for the tests of ``bench``."""

import json
import math
import time
from pathlib import Path

import numpy as np

from hvdkit.steps.step_times import VARIABLE
from hvdkit.tune.jobs import Job


class Machine:
    """Stands for ``tune.jobs.Launch``: what a job takes on n ranks is ``seconds(n)`` for each step, times noise.

    Attributes:
        count: steps of a job on n ranks.
        warmup: the first steps of a job that take ten times as long.
        late: seconds by which each rank computes longer than the others, by rank.
        marks: the ranks say when they are ready.
        fails: numbers of the jobs (from 1) that fail.
        silent: jobs record no steps and print the closing line.
    """

    def __init__(self, seconds, noise=0.02, seed=0):
        self.seconds, self.noise = seconds, noise
        self.rng = np.random.default_rng([seed, 7])
        self.count, self.warmup = (lambda n: 20), 5
        self.late, self.marks = {}, False
        self.fails, self.silent, self.interrupt_at = (), False, None
        self.failure = "exited with status 3; its last lines:\nValueError: broken"
        self.ran = []

    def launch_method(self):
        """What takes the place of ``Launch.__call__``."""
        return lambda launch, _setting, _timeout_s: self.launch(launch)

    def failed(self):
        """A job that failed."""
        return Job(1.0, failure=self.failure)

    def launch(self, launch):
        """Run a job of a ``Launch``."""
        n = launch.n
        if len(self.ran) + 1 == self.interrupt_at:
            self.interrupt_at = None
            raise KeyboardInterrupt
        self.ran.append(n)
        if len(self.ran) in self.fails:
            return self.failed()
        step = self.seconds(n) * math.exp(self.rng.normal(0, self.noise))
        if self.silent:
            return Job(step * self.count(n) + 1, step * self.count(n))
        (told,) = [word for word in launch.options if word.startswith(f"{VARIABLE}=")]
        for rank in range(n):
            self._write(Path(told.partition("=")[2]), rank, n, step)
        return Job(step * self.count(n) + 1)

    def _write(self, directory, rank, n, step):
        lines = [{"hvdkit": "step times", "version": 1, "rank": rank}]
        now = time.time() + 2.0
        longest = max(self.late.get(other, 0.0) for other in range(n))
        for index in range(self.count(n)):
            whole = (step + longest) * (10 if index < self.warmup else 1)
            given = now + 0.1 * step
            ready = now + 0.7 * step + self.late.get(rank, 0.0) if self.marks else None
            lines.append([now, given, ready, now + whole])
            now += whole
        (directory / f"rank-{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
