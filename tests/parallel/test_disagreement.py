"""Whatever one rank alone changes is an error on every rank that names it, in all frameworks alike."""

import warnings
from typing import Any

import numpy as np
import pytest
from programs_checks import message
from ranks import KERAS, on_ranks

LOOPS = ("torch", "tensorflow")
OVER_MPI = {("tensorflow", 2)}
SAMPLES, BATCH = 72, 4  # six steps of three ranks
FIRST = {2: "between rank 0 and rank 1", 3: "between ranks 0, 2 and rank 1"}
LAST = {2: "between rank 0 and rank 1", 3: "between ranks 0-1 and rank 2"}
INJECTED = {
    "nothing": "",
    "weight": "differs {between}, by at most 0.000977; broadcast before training",
    "rate": "differs {between}, by at most 0.01; broadcast before training",
    "epoch": "loader.epoch differs {between}, by at most 7; shard the same data set",
    "seed": "seed_everything's seed differs {between}, by at most 1; call seed_everything",
}


def make_data() -> tuple[np.ndarray, np.ndarray]:
    x = np.random.default_rng(5).normal(size=(SAMPLES, 6)).astype(np.float32)
    return x, (x.sum(axis=1) > 0).astype(np.int64)


@on_ranks(*LOOPS, n=3)
@pytest.mark.parametrize("reaction", ["raise", "warn"])
def test_a_nudged_weight_is_reported_on_every_rank_at_the_next_check(hk, on, world, reaction):
    """After step 3, one element of a weight on rank 1 is 2**-10 larger; checked every second step."""
    training = on.Training(0)
    check = hk.CheckAgreement(training.model, training.optimizer, world, every=2, on_disagreement=reaction)
    error, steps = "", 0
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for x, y, w in hk.shard(on.dataset(*make_data()), world, BATCH, remainder="exact"):
            training.step(x, y, w)
            steps += 1
            if steps == 3 and world.rank == 1:
                on.nudge(training)
            error = message(check.step)
            if error or steps == 6:
                break
    said = [str(one.message) for one in warned if "disagree" in str(one.message)]
    reports = [error.removeprefix("AgreementError: ")] if reaction == "raise" else said
    assert [report.partition(",")[0] for report in reports] == ["after step 4", "after step 6"][: len(reports)]
    assert (steps, len(reports), len(said)) == ((4, 1, 0) if reaction == "raise" else (6, 2, 2))
    assert f"differs {FIRST[world.size]}, by at most 0.00097" in reports[0]  # step 4 has decayed it
    assert "; broadcast before training, and average every gradient" in reports[0]


@on_ranks(*LOOPS, *KERAS, n=3)
def test_what_the_last_rank_alone_changes_is_named(hk, on, world):
    for kind, said in INJECTED.items():
        hk.seed_everything(3, world)
        training: Any = on.Training(0, optimizer="adam")
        optimizer = training.model.optimizer if hk.__name__ == "hvdkit.keras" else training.optimizer
        hk.broadcast_state(training.model, optimizer)
        loader = hk.shard(on.dataset(*make_data()), world, BATCH)
        if world.rank == world.size - 1:
            if kind == "weight":
                on.nudge(training)
            elif kind == "rate":
                on.set_rate(optimizer, 0.02)
            elif kind == "epoch":
                loader.set_epoch(7)
            elif kind == "seed":
                hk.seed_everything(4, world)
        error = message(lambda: hk.check_agreement(training.model, optimizer, world, loader=loader))  # noqa: B023
        assert said.format(between=LAST[world.size]) in error and bool(said) == bool(error), kind
