"""observe/stragglers.py: what is injected is reported within three windows, what is noise is not."""

import math

import numpy as np
import pytest

from hvdkit.observe import lateness
from hvdkit.observe.stragglers import Scores, summary


class Job:
    """Windows of 50 steps of a healthy job, to which a test adds what it injects."""

    def __init__(self, size, per_host=4, compute=0.1, seed=0):
        self.size, self.step, self.compute = size, 0, compute
        self.scores = Scores([f"n{rank // per_host}" for rank in range(size)])
        self.noise = np.random.default_rng(seed)
        self.processor = False

    def window(self, loss=None, **injected):
        self.step += 50
        ranks = {
            "input": self.noise.normal(1e-3, 1e-5, self.size),
            "compute": self.noise.normal(self.compute, self.compute / 100, self.size),
        }
        for name in ranks.keys() & injected:
            at, more = injected[name]
            ranks[name][at] += more
        own = ranks["input"] + ranks["compute"]
        ranks["wait"] = own.max() - own + 0.002
        ranks["step"] = own + ranks["wait"]
        ranks |= self.measured(ranks, injected)
        if loss is not None:
            ranks["loss"] = np.asarray(loss, float)
        return self.scores.window(self.step, 50, ranks)

    def measured(self, ranks, injected):
        """What the processor gave; "blocked" and "queued" are parts of the computation in which the thread did not run,
        and "unread": nobody says when a batch is there."""
        if not self.processor:
            return {}
        lacks = np.zeros(self.size)
        queued = np.zeros(self.size)
        for name in ("blocked", "queued"):
            if name in injected:
                ranks["compute"][injected[name][0]] += injected[name][1]
                lacks[injected[name][0]] += injected[name][1]
                queued[injected[name][0]] += injected[name][1] if name == "queued" else 0.0
        ran = ranks["compute"] - lacks
        own = ranks["input"] + ranks["compute"]
        ranks["wait"] = own.max() - own + 0.002
        ranks["step"] = own + ranks["wait"]
        stalls = np.zeros(self.size)
        if "stalls" in injected:
            rank, every, each = injected["stalls"]
            ranks["compute"][rank] += each / every
            stalls[rank] = 50 / every
        if "unread" in injected:
            ranks["compute"], ranks["input"] = own, np.full(self.size, np.nan)
        return {"ran": ran, "queued": queued, "of_all": 1.1 * ran, "typical": own, "stalls": stalls}

    def windows(self, count, **injected):
        return [report for _ in range(count) for report in self.window(**injected)]


def test_of_two_slow_ranks_each_costs_what_mending_it_alone_saves():
    job = Job(8)
    job.windows(5)
    reports = {report.rank: report for report in job.windows(3, input=(3, 0.03), compute=(5, 0.02))}
    assert reports[3].cost == pytest.approx(0.01, rel=0.3)
    assert reports[5].cost == pytest.approx(0.0, abs=1e-3)
    assert reports[5].text.endswith("it costs nothing until rank 3 is as fast as the others.")


@pytest.mark.parametrize("size", [2, 3, 8, 200])
@pytest.mark.parametrize(("cause", "more"), [("input", 0.02), ("compute", 0.02)])
def test_a_rank_that_becomes_slow_is_reported_once_within_three_windows(size, cause, more):
    job = Job(size, per_host=1)
    assert job.windows(5) == []
    (report,) = job.windows(3, **{cause: (1, more)})
    assert (report.about, report.rank, report.cause, report.since, report.step) == ("straggler", 1, cause, 250, 400)
    assert report.cost == pytest.approx(more, rel=0.3)
    assert "Rank 1 on n1" in report.text and "since step 250" in report.text
    assert job.windows(10, **{cause: (1, more)}) == []
    assert job.windows(3) == []
    assert [one.rank for one in job.windows(3, **{cause: (1, more)})] == [1], "it was over, and is there again"


@pytest.mark.parametrize(
    ("injected", "cause", "says"),
    [
        ({"compute": (1, 0.02)}, "compute", "computes longer: "),
        ({"blocked": (1, 0.02)}, "blocked", "is blocked: "),
        ({"queued": (1, 0.02)}, "cores", "shares its cores with others: "),
        ({"input": (1, 0.02)}, "input", "waits for its input: "),
        ({"input": (1, 0.02), "unread": True}, "late", "comes late, by its input or computation: "),
        ({"compute": (1, 0.02), "unread": True}, "compute", "computes"),
        ({"stalls": (1, 25, 0.5)}, "random-late", "is late in about one step of 25, "),
    ],
)
def test_a_report_names_the_cause_that_was_measured_and_no_other(injected, cause, says):
    job = Job(4, per_host=1)
    job.processor = True
    unread = {name: value for name, value in injected.items() if name == "unread"}
    assert job.windows(5, **unread) == []
    (report,) = job.windows(3, **injected)
    assert (report.about, report.rank, report.cause) == ("straggler", 1, cause)
    assert says in report.text and report.cost == pytest.approx(0.02, rel=0.3)


def test_half_of_the_ranks_are_one_report():
    job = Job(16, per_host=16)
    job.windows(3)
    (report,) = job.windows(4, compute=(slice(0, 8), 0.05))
    assert report.rank is None and report.text.startswith("Half of the ranks (0-7) compute ")


def test_a_slow_host_is_one_report():
    job = Job(16)
    job.windows(3)
    (report,) = job.windows(4, compute=(slice(4, 8), 0.05))
    assert report.rank is None
    assert report.text.startswith("Host n1 (ranks 4-7) computes longer: 50")


def test_what_lasts_two_windows_is_noise():
    job = Job(4)
    for _ in range(5):
        assert job.windows(2, compute=(2, 0.1)) == []
        assert job.windows(1) == []


def test_a_loss_that_parts_from_the_others():
    job = Job(4)
    assert job.windows(3, loss=[1.0, 1.1, 0.9, 1.2]) == []
    (report,) = job.windows(4, loss=[1.0, 1.1, 0.9, 7.0])
    assert (report.about, report.rank, report.cause) == ("health", 3, "loss")


def test_the_first_rank_with_a_number_that_is_not_finite_is_named():
    scores = Scores(["n0"] * 4)
    well = np.nan
    seen = np.array([42, well, 41, 42])
    (report,) = scores.nonfinite(50, "gradient", seen, "the gradient of dense.weight")
    assert (report.rank, report.cause, report.since) == (2, "nonfinite", 41)
    assert report.text == "Rank 2: the gradient of dense.weight is not finite in step 41."
    assert scores.nonfinite(100, "gradient", np.array([well, 99, well, well]), "the gradient of dense.weight") == []
    assert scores.nonfinite(100, "loss", np.full(4, well), "the loss") == []
    (report,) = scores.nonfinite(50, "loss", np.full(4, 7.0), "the loss")
    assert report.rank is None and report.text.startswith("All ranks: ")


def test_ranks_of_which_nobody_knows_when_they_wait_are_not_blamed():
    scores, unknown = Scores(["n0", "n1"]), np.full(2, np.nan)
    for step in range(50, 2000, 50):
        ranks = dict.fromkeys(("input", "compute", "wait"), unknown) | {"step": np.array([0.1, 0.3])}
        assert scores.window(step, 50, ranks) == []


def test_healthy_ranks_with_heavy_tails_bring_few_reports():
    """1,000 ranks whose steps have stalls of a Pareto distribution without a variance: docs/monitor.md has more."""
    noise = np.random.default_rng(3)
    scores = Scores([f"n{rank // 8}" for rank in range(1000)])
    reports = []
    for window in range(200):
        stalls = 0.01 * noise.pareto(1.5, (1000, 50)).mean(axis=1)
        compute = noise.normal(0.1, 0.002, 1000) + stalls
        zeros = np.zeros(1000)
        wait = compute.max() - compute
        ranks = {
            "step": compute + wait,
            "input": zeros,
            "compute": compute,
            "wait": wait,
        }
        reports += scores.window(50 * window + 50, 50, ranks)
    assert len(reports) <= 1


def test_of_many_ranks_a_line_shows_the_slowest():
    compute = np.arange(100.0)
    values = {"step": compute, "input": np.zeros(100), "compute": compute, "wait": np.full(100, np.nan)}
    said = summary(values)
    assert said["rank"] == list(range(68, 100)) and said["step"] == list(compute[68:])
    assert said["wait"] == [None] * 32
    few = summary({name: one[:3] for name, one in values.items()})
    assert few == {"step": [0, 1, 2], "input": [0, 0, 0], "compute": [0, 1, 2], "wait": [None] * 3}


@pytest.mark.parametrize(
    ("ran", "queued", "of_all", "itself", "read", "word"),
    [
        (0.9, 0.0, 0.9, True, True, "compute"),
        (0.0, 0.9, 0.0, True, True, "cores"),
        (0.0, 0.0, 0.0, True, True, "blocked"),
        (0.0, 0.0, 0.0, True, False, "unread"),
        (0.3, 0.4, 0.3, True, True, "cores"),
        (0.4, 0.3, 0.4, True, True, "compute"),
        (0.2, 0.1, 0.2, True, True, "blocked"),
        (0.0, 0.0, 0.9, False, True, "compute"),
        (0.0, 0.0, 0.0, False, True, "blocked"),
        (0.0, 0.0, 0.3, False, True, "late"),
        (math.nan, math.nan, math.nan, True, True, "compute"),
        (math.nan, math.nan, math.nan, True, False, "late"),
    ],
)
def test_what_a_late_rank_does_is_said_where_its_threads_show_it(ran, queued, of_all, itself, read, word):
    assert lateness.why(1.0, ran, queued, of_all, itself=itself, read=read) == word
