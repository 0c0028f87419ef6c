"""Training with n processes is the same computation as one process with the n-fold batch, ragged end included."""

import importlib.util
from typing import Any

import forked
import numpy as np
import pytest

MODULES = {"torch": forked.TORCH, "tensorflow": forked.TENSORFLOW, "keras": forked.TENSORFLOW}
MISSING = [name for name in ("torch", "tensorflow", "keras", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

RANKS = (2, 3, 4)
OVER_MPI = {("torch", 2), ("torch", 4), ("tensorflow", 2), ("keras", 2)}
"""Framework and ranks; the others are forked and connected over Gloo."""
BUCKETS = {"one bucket": "adam", "small buckets": "predivide", "buckets with accumulation": "accumulation"}
EXACT = ("sgd", "adam", "filler", "accumulation", "predivide", "global batch norm", *BUCKETS)
_answers: dict[tuple[str, int], list[Any]] = {}


@pytest.fixture(params=MODULES)
def on(request, run_ranks, tmp_path):
    """What n ranks of programs_equivalence_FRAMEWORK.py found, by n; they start once for all tests of this file."""

    def ranks(n: int) -> list[Any]:
        key = (request.param, n)
        if key not in _answers:
            start = run_ranks if key in OVER_MPI else forked.starter(MODULES[request.param], tmp_path)
            _answers[key] = start(f"programs_equivalence_{request.param}.py", "everything", n)
        return _answers[key]

    return ranks


def differs(weights: list[float], expected: list[float]) -> float:
    """The largest difference, relative to the largest weight."""
    return np.abs(np.subtract(weights, expected)).max() / np.abs(expected).max()


@pytest.mark.parametrize("n", RANKS)
def test_n_ranks_end_with_the_weights_of_one_process(on, n):
    (alone,) = on(1)
    for rank in on(n):
        for name in [name for name in EXACT if name in alone["trained"]]:
            assert rank["trained"][name] == pytest.approx(alone["trained"][name], rel=1e-10, abs=1e-12), name
        assert rank["trained"]["float32"] == pytest.approx(alone["trained"]["float32"], rel=1e-5, abs=1e-6)
        assert rank["trained"] == on(n)[0]["trained"]


@pytest.mark.parametrize("n", RANKS)
def test_fp16_gradients_stay_within_their_rounding(on, n):
    """Each gradient is rounded to 11 bits (2**-11 = 0.0005 of itself) and added up in 11 bits, n times at most."""
    (alone,) = on(1)
    exact, begin = np.array(alone["trained"]["sgd"]), np.array(alone["begin"])
    travelled = np.linalg.norm(exact - begin)
    for rank in on(n):
        off = np.linalg.norm(rank["trained"]["fp16"] - exact) / travelled
        assert 1e-7 < off < (n + 1) * 2**-11


@pytest.mark.parametrize("n", RANKS)
def test_gradients_in_buckets_end_with_the_weights_of_gradients_that_travel_alone(on, n):
    for rank in on(n):
        trained = rank["trained"]
        for bucketed, alone in BUCKETS.items():
            if bucketed in trained:
                assert trained[bucketed] == pytest.approx(trained[alone], rel=1e-10, abs=1e-12), bucketed
        if "fp16 in buckets" in trained:
            assert 0 < differs(trained["fp16 in buckets"], trained["sgd"]) < 0.01


@pytest.mark.parametrize("n", RANKS)
def test_local_batch_norm_is_that_of_one_process_on_parts_of_the_batch(on, n):
    (alone,) = on(1)
    for rank in on(n):
        assert rank["trained"]["local batch norm"] == pytest.approx(alone["parts"][str(n)], rel=1e-10, abs=1e-12)
        assert differs(rank["trained"]["local batch norm"], alone["trained"]["local batch norm"]) > 1e-3


@pytest.mark.parametrize("mistake", ["equal weights", "no broadcast", "no average"])
def test_the_comparison_finds_each_mistake(on, mistake):
    (alone,) = on(1)
    for n in RANKS:
        assert any(differs(rank["wrong"][mistake], alone["trained"]["sgd"]) > 1e-4 for rank in on(n)), n
    assert alone["wrong"][mistake] == alone["trained"]["sgd"]


@pytest.mark.parametrize("n", RANKS)
def test_evaluation_sees_every_sample_once(on, n):
    (alone,) = on(1)
    for rank in on(n):
        assert rank["metrics"] == alone["metrics"]


def test_the_ranks_met_over_mpi_and_over_gloo(on, request):
    framework = request.node.callspec.params["on"]
    for n in RANKS:
        assert {rank["over mpi"] for rank in on(n)} == {(framework, n) in OVER_MPI}
