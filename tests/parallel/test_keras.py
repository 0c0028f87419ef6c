"""hvdkit.keras on real ranks, on each backend of Keras 3. Few starts of ranks answer many tests."""

import importlib.util
from typing import Any

import pytest

REQUIRED = ("keras", "horovod", "tensorflow", "torch", "jax")
MISSING = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_keras.py"
BACKENDS = ("tensorflow", "torch", "jax")
_answers: dict[Any, list[Any]] = {}


@pytest.fixture
def once(run_ranks, monkeypatch, tmp_path_factory):
    """``run_ranks`` with Keras on one backend; the same ranks start once for all tests of this file."""

    def run(backend: str, function: str, n: int, **arguments: Any) -> list[Any]:
        key = (backend, function, n, *arguments.items())
        if key not in _answers:
            monkeypatch.setenv("KERAS_BACKEND", backend)
            if function == "together":
                arguments["directory"] = str(tmp_path_factory.mktemp(backend))
            _answers[key] = run_ranks(PROGRAM, function, n, **arguments)
        return _answers[key]

    return run


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "loss scale"])
def test_two_ranks_end_with_the_weights_of_one_process(once, backend, optimizer):
    expected = once(backend, "alone", 1)[0]["train"][optimizer]
    first, second = (rank["train"][optimizer] for rank in once(backend, "together", 2))
    assert first == second
    assert first == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ragged_end_is_exact_and_metrics_are_those_of_all_samples(once, backend):
    expected = once(backend, "alone", 1)[0]["train_exact"]
    for rank in once(backend, "train_exact", 3, global_batch=12):
        assert rank["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-6)
        assert rank["accuracy"] == pytest.approx(expected["accuracy"])


def test_gloo_gives_the_same(once):
    expected = once("tensorflow", "alone", 1)[0]["train"]
    first, second = once("tensorflow", "train", 2, controller="gloo", global_batch=8)
    assert first == second
    assert first["sgd"] == pytest.approx(expected["sgd"], rel=1e-5, abs=1e-6)


def test_horovods_own_keras_optimizer_averages_nothing(once):
    """Why hvdkit.keras exists: no error, and two models."""
    first, second = once("tensorflow", "train_with_horovods_own_optimizer", 2)
    assert first != pytest.approx(second, rel=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_mistake_is_one_error_on_every_rank(once, backend):
    for number, rank in enumerate(once(backend, "together", 2)):
        found = rank["mistakes"]
        assert found["twice"].startswith("InvalidArgumentError: this optimizer")
        assert f"fit was called on rank {number} of 2 with an optimizer (SGD)" in found["undistributed"]
        assert "different numbers of steps per epoch (5 on rank 0, 6 on rank 1)" in found["steps"]
        assert "before the first step of fit, the ranks disagree" in found["no broadcast"]
        assert "is not built yet" in found["unbuilt"]
        assert "differs between rank 0 and rank 1, by at most 0.0001" in found["nudged"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_loads_with_and_without_hvdkit(once, backend):
    ranks = [rank["round trip"] for rank in once(backend, "together", 2)]
    for rank in ranks:
        assert rank["alone"] == ["True", "5"]
        assert (rank["before"], rank["class"], rank["same"]) == (5, "Adam", True)
    assert ranks[0]["weights"] == ranks[1]["weights"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_resume_and_average(once, backend):
    first, second = (rank["callbacks"] for rank in once(backend, "together", 2))
    assert first == second
    assert first["initial_epoch"] == 2 and first["epochs"] == [2, 3]
    assert first["val_accuracy"] == pytest.approx(first["all_samples"])


def test_warmup_logs_the_tutorials_rates(once):
    assert once("tensorflow", "alone", 1)[0]["warmup"] == [0.0333, 0.0567, 0.08, 0.08, 0.08]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_in_one_call(once, backend):
    first, second = (rank["fit"] for rank in once(backend, "together", 2))
    assert first == second
    assert first["losses"][-1] < first["losses"][0]
