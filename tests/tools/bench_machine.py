"""A machine on which jobs are only numbers: their ranks write steps of known length, for the tests of ``bench``."""

import json
import math
import os
import time
from pathlib import Path

import numpy as np

from hvdkit import DataError, cli
from hvdkit.common import json_files
from hvdkit.core.listeners import STEP_TIMES
from hvdkit.jobs.launch import facts
from hvdkit.jobs.launch.model import Horovod, LaunchFacts, Mpi
from hvdkit.jobs.trials import Launch, TrialJob
from hvdkit.measure.bench import results
from hvdkit.measure.bench.analysis import ScalingSummary


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
        return TrialJob(1.0, failure=self.failure)

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
            return TrialJob(step * self.count(n) + 1, step * self.count(n))
        (told,) = [word for word in launch.options if word.startswith(f"{STEP_TIMES}=")]
        begin = time.time() + 2.0
        for rank in range(n):
            self._write(Path(told.partition("=")[2]), rank, n, step, begin)
        return TrialJob(step * self.count(n) + 1)

    def _write(self, directory, rank, n, step, now):
        lines = [{"hvdkit": "step times", "version": 1, "rank": rank}]
        longest = max(self.late.get(other, 0.0) for other in range(n))
        for index in range(self.count(n)):
            whole = (step + longest) * (10 if index < self.warmup else 1)
            given = now + 0.1 * step
            ready = now + 0.7 * step + self.late.get(rank, 0.0) if self.marks else None
            lines.append([now, given, ready, now + whole])
            now += whole
        (directory / f"rank-{rank}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def use(directory, monkeypatch, machine, cores=4):
    """Have jobs of ``directory`` run on a machine of numbers, with so many cores, Open MPI and train.py."""
    found = LaunchFacts(
        cores, False, Path("/venv/bin/python"), os.environ["PATH"], Horovod(mpi=True, gloo=True),
        Mpi(Path("/venv/bin/mpirun"), "Open MPI", (5, 0, 11)), Path("/venv/bin/horovodrun"),
    )  # fmt: skip
    monkeypatch.setattr(facts, "gather", lambda request, environ: found)
    monkeypatch.setattr(Launch, "__call__", machine.launch_method())
    (directory / "train.py").touch()
    monkeypatch.chdir(directory)
    monkeypatch.setenv("COLUMNS", "200")
    for name in ("OMP_NUM_THREADS", "HOROVOD_AUTOTUNE", "HOROVOD_CYCLE_TIME"):
        monkeypatch.delenv(name, raising=False)
    return machine


def run_bench(*words, ranks="1,2,4"):
    """The exit status of ``hvdkit bench scaling`` with one thread a rank."""
    return cli.run(["bench", "scaling", "-n", ranks, "-o", "results.json", "--threads", "1", *words, "--", "train.py"])


def saved(path="results.json"):
    """What it kept."""
    return json.loads(Path(path).read_text())


def fitting(value):
    """Whether a value is as the classes of the results and of their summary say."""
    try:
        json_files.decode(json.dumps(value), results.ScalingResults, "it")
        if value["summary"] is not None:
            head = {"hvdkit": "1", "kind": ScalingSummary.kind, "schema": ScalingSummary.schema}
            json_files.decode(json.dumps({**value["summary"], **head}), ScalingSummary, "its summary")
    except DataError:
        return False
    return True
