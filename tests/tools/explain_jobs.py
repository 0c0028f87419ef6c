"""Recordings of jobs that are made up, each with one known cause: for the tests of explain, and for its benchmark."""

import json

import numpy as np

from hvdkit.observe.step_files import RankTimes, Step, StepEvent
from hvdkit.read.explain import step_causes

STEPS = 200


class Job:
    """A job whose steps are what its parts say: seconds (ranks, steps) until the batch is there, and of computation.

    ``late`` is spent between the exchange and the next batch.
    """

    def __init__(self, ranks=4, steps=STEPS, seed=0, noise=0.02):
        rng = np.random.default_rng(seed)
        self.rng, self.shape = rng, (ranks, steps)
        self.input = 2e-4 * rng.uniform(0.8, 1.2, self.shape)
        self.compute = 0.02 * (1 + noise * rng.standard_exponential(self.shape))
        self.late = np.zeros(self.shape)
        self.queued = np.full(ranks, 1e-4)
        self.blocked = np.zeros(ranks)
        self.cpus = [None] * ranks
        self.events = [[] for _ in range(ranks)]
        self.exact = False
        self.hosts = [1] * ranks
        self.first = 0.0
        self.ready = True
        self.exchange = 0.002

    @property
    def ran(self):
        return self.compute.mean(axis=1) - self.queued - self.blocked

    @property
    def of_all(self):
        return 1.05 * self.ran

    def times(self):
        ranks, steps = self.shape
        now = np.ones(ranks)
        found = [[] for _ in range(ranks)]
        for step in range(steps):
            asked = now + self.late[:, step]
            given = asked + self.input[:, step]
            ready = given + self.compute[:, step] + (self.first if step == 0 else 0)
            now = np.full(ranks, ready.max() + np.broadcast_to(self.exchange, steps)[step])
            for rank in range(ranks):
                said = float(ready[rank]) if self.ready else None
                # the wait of the first rank is in its own step: it asks for its next batch when the exchange is over
                ended = float(now[rank] + (self.late[rank, step + 1] if step + 1 < steps else 0))
                arrived = float(now[rank]) if self.exact else None
                found[rank].append(Step(float(asked[rank]), float(given[rank]), said, ended, arrived))
        return [
            RankTimes(
                rank,
                tuple(found[rank]),
                self.hosts[rank],
                (self.ran[rank], self.queued[rank], self.of_all[rank]),
                self.cpus[rank],
                tuple(StepEvent(name, found[rank][at].given + 1e-4, spent) for name, at, spent in self.events[rank]),
            )
            for rank in range(ranks)
        ]

    def seconds(self):
        """The whole time, from the first step to the last."""
        steps = [rank.steps for rank in self.times()]
        return max(one[-1].ended for one in steps) - min(one[0].asked for one in steps)

    def told(self, tmp_path, launched=None):
        return step_causes.look(self.times(), tmp_path / "steps", launched)

    def write(self, directory):
        (directory / "steps").mkdir(parents=True)
        for rank in self.times():
            head = {"hvdkit": "step times", "version": 1, "rank": rank.rank, "host": rank.host}
            used = [None] * 3
            steps = [[step.asked, step.given, step.ready, step.ended, step.arrived, *used] for step in rank.steps]
            names, count = ("ran", "queued", "of_all"), len(steps)
            sums = {name: count * mean for name, mean in zip(names, rank.cores, strict=True)}
            text = "".join(f"{json.dumps(line)}\n" for line in [head, *steps, {"steps": count, **sums}])
            (directory / "steps" / f"rank-{rank.rank}.jsonl").write_text(text)


def input_of_one(job):
    job.input[2, np.arange(STEPS) % 3 > 0] += 0.02


def compute_of_one(job):
    job.compute[1] += 0.01


def work_between_steps(job):
    job.late[3] += 0.01


def shared_core(job):
    job.compute[0] += 0.01
    job.queued[0] = 0.009


def slow_host(job):
    job.hosts = [1, 1, 2, 2]
    job.compute[2:] += 0.01


def late_now_and_then(job):
    job.compute[1, job.rng.random(STEPS) < 0.1] += 0.1


def another_rank_each_step(job):
    job.compute[job.rng.integers(0, 4, STEPS), np.arange(STEPS)] += 0.01


def input_everywhere(job):
    job.input += 0.01


def input_of_another_rank_each_step(job):
    job.input[job.rng.integers(0, 4, STEPS), np.arange(STEPS)] += 0.01


def uneven_input_everywhere(job):
    job.input += job.rng.uniform(0.0, 0.0125, job.shape)


def few_cores(job):
    job.queued[:] = 0.006


def first_step(job):
    job.first = 10.0


def lock(job):
    job.compute[1] += 0.01
    job.blocked[1] = 0.01


def fsync(job):
    lock(job)
    job.events[1] = [("fsync", step, 0.01) for step in range(STEPS)]


def garbage(job):
    """Every rank collects at steps of its own: the others wait for each of them."""
    for rank in range(4):
        job.compute[rank, rank * 2 :: 10] += 0.05
        job.events[rank] = [("gc", step, 0.05) for step in range(rank * 2, STEPS, 10)]


def bound_to_one_core(job):
    few_cores(job)
    job.cpus = [{3}] * 4


def two_bound_to_one_core(job):
    job.compute[2:] += 0.01
    job.queued[2:] = 0.0095
    job.cpus = [{0}, {1}, {2}, {2}]


def half_of_the_ranks(job):
    job.__init__(16)
    job.compute[:8] += 0.01


def most_of_the_ranks(job):
    job.__init__(16)
    job.compute[4:] += 0.01


def whole_host(job):
    job.__init__(16)
    job.hosts = [rank // 4 for rank in range(16)]
    job.compute[8:12] += 0.01


def stall_of_all(job):
    job.compute[:, 49::50] += 1.0


def pause_of_all(job):
    job.late[:, 49::50] += 1.0
    job.exact = True


def pause_of_the_root(job):
    job.late[0, 49::50] += 1.0


def evaluation_of_the_root(job):
    job.compute[0, 49::50] += 1.0


def saving_of_all(job):
    stall_of_all(job)
    job.events = [[("saving", step, 1.0) for step in range(49, STEPS, 50)]] * 4


def named_evaluation_of_the_root(job):
    evaluation_of_the_root(job)
    job.events[0] = [("evaluation", step, 1.0) for step in range(49, STEPS, 50)]


def sharing_of_all(job):
    job.compute += 0.02
    job.events = [[("shard_state", step, 0.02) for step in range(STEPS)]] * 4


def growth_of_all(job):
    job.compute *= 1 + np.arange(STEPS) / STEPS


def growth_of_one(job):
    job.compute[2] *= 1 + np.arange(STEPS) / STEPS


def slower_since(job):
    job.compute[:, 120:] *= 1.5


def first_steps_of_all(job):
    job.input[:, :60] += 0.02


def first_steps_of_one(job):
    job.input[1, :60] += 0.02


def first_steps_compute(job):
    job.compute[:, :60] += 0.02


def first_15_steps(job):
    """Five of them are the warm-up."""
    job.compute[:, :15] += 0.3


def every_second_step(job):
    job.compute[:, ::2] += 0.02


def exchange_that_grows(job):
    job.exchange = np.linspace(0.002, 0.03, STEPS)


def large_exchange(job):
    job.exchange = 0.024


INJECTED = {
    lock: ("blocked", (1,), 10e-3),
    fsync: ("blocked", (1,), 10e-3),
    garbage: ("gc", (), 20e-3),
    bound_to_one_core: ("affinity", (), 6e-3),
    two_bound_to_one_core: ("affinity", (2, 3), 10e-3),
    half_of_the_ranks: ("compute", tuple(range(8)), 10e-3),
    most_of_the_ranks: ("compute", tuple(range(4, 16)), 10e-3),
    whole_host: ("host", (8, 9, 10, 11), 10e-3),
    stall_of_all: ("stall", (), 20e-3),
    pause_of_all: ("pause", (), 20e-3),
    pause_of_the_root: ("pause", (0,), 20e-3),
    evaluation_of_the_root: ("pause", (0,), 20e-3),
    saving_of_all: ("pause", (), 20e-3),
    named_evaluation_of_the_root: ("pause", (0,), 20e-3),
    sharing_of_all: ("shard_state", (), 20e-3),
    growth_of_all: ("growth", (), 10e-3),
    growth_of_one: ("growth", (2,), 10e-3),
    slower_since: ("growth", (), 4e-3),
    first_steps_of_all: ("first-steps", (), 1.2),
    first_steps_of_one: ("first-steps", (1,), 1.2),
    first_steps_compute: ("first-steps", (), 1.2),
    first_15_steps: ("first-steps", (), 4.5),
    every_second_step: ("stall", (), 10e-3),
    exchange_that_grows: ("growth", (), 14e-3),
    large_exchange: ("exchange", (), 24e-3),
    input_of_one: ("input", (2,), 20e-3 * 2 / 3),
    compute_of_one: ("compute", (1,), 10e-3),
    work_between_steps: ("compute", (3,), 10e-3),
    shared_core: ("host", (0,), 10e-3),
    slow_host: ("host", (2, 3), 10e-3),
    late_now_and_then: ("random-late", (1,), 10e-3),
    another_rank_each_step: ("random-late", (), 10e-3),
    input_everywhere: ("input-everywhere", (), 10e-3),
    input_of_another_rank_each_step: ("input-everywhere", (), 10e-3),
    uneven_input_everywhere: ("input-everywhere", (), 10e-3),
    few_cores: ("few-cores", (), 6e-3),
    first_step: ("first-step", (), 10.0),
}


def scaled(inject, strength, seed, noise=0.02):
    """A job with a cause of so many times its usual strength, and what it would take without: seconds of both."""
    job = Job(seed=seed, noise=noise)
    inject(job)
    healthy = Job(*job.shape, seed=seed, noise=noise)
    if len(healthy.input) != 4:
        job = Job(*job.shape, seed=seed, noise=noise)
        injected = Job(seed=seed, noise=noise)
        inject(injected)
        job.__dict__.update(injected.__dict__)
        healthy = Job(len(job.input), seed=0)
    for name in ("input", "compute", "late", "blocked"):
        base = getattr(healthy, name)
        setattr(job, name, base + strength * (getattr(job, name) - base))
    job.queued = 1e-4 + strength * (job.queued - 1e-4)
    job.queued = np.minimum(job.queued, 0.9 * job.compute.mean(axis=1))
    job.exchange = healthy.exchange + strength * (job.exchange - healthy.exchange)
    job.first *= strength
    job.events = [[(name, step, strength * spent) for name, step, spent in events] for events in job.events]
    if inject in (few_cores, bound_to_one_core):
        healthy.compute = np.maximum(0.0, job.compute - job.queued[:, None])
    return job, job.seconds(), healthy.seconds()
