"""hvdkit.keras on real ranks, on each backend of Keras 3.

On each backend ``together`` of programs_keras.py starts once on three ranks, and ``alone`` of programs_keras_alone.py
once on one process; a test asks for what a function of theirs found, by its name (see checks_of_ranks.py).
"""

import importlib.util

import pytest
from checks_of_ranks import Start, StartOnce

REQUIRED = ("keras", "horovod", "tensorflow", "torch", "jax")
MISSING = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_keras.py"
BACKENDS = ("tensorflow", "torch", "jax")


@pytest.fixture
def start_once(ranks_command, tmp_path_factory):
    return StartOnce(ranks_command, tmp_path_factory)


@pytest.fixture
def ranks(start_once):
    """Three ranks on a backend."""

    def on(backend: str) -> Start:
        return start_once(PROGRAM, "together", 3, backend)

    return on


@pytest.fixture
def alone(start_once, ranks):
    """One process on a backend, which also loads the models that the ranks have saved."""

    def on(backend: str) -> Start:
        models = str(ranks(backend).directory)
        return start_once("programs_keras_alone.py", "alone", 1, backend, models=models)

    return on


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "loss scale"])
def test_the_ranks_end_with_the_weights_of_one_process(ranks, alone, backend, optimizer):
    first, *others = (rank[optimizer] for rank in ranks(backend)("train"))
    assert len(others) == 2 and others == [first, first]
    assert first == pytest.approx(alone(backend)("train")[0][optimizer], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_ragged_end_is_exact_and_metrics_are_those_of_all_samples(ranks, alone, backend):
    (expected,) = alone(backend)("train exact")
    for rank in ranks(backend)("train exact"):
        assert rank["weights"] == pytest.approx(expected["weights"], rel=1e-5, abs=1e-6)
        assert rank["accuracy"] == pytest.approx(expected["accuracy"])


def test_gloo_gives_the_same(start_once, alone):
    first, second = start_once(PROGRAM, "over_gloo", 2, "torch", controller="gloo")("train")
    assert first == second
    assert first["sgd"] == pytest.approx(alone("torch")("train")[0]["sgd"], rel=1e-5, abs=1e-6)


def test_horovods_own_keras_optimizer_averages_nothing(ranks):
    """Why hvdkit.keras exists: no error, and several models."""
    first, second, third = ranks("tensorflow")("horovods own optimizer")
    assert first != pytest.approx(second, rel=1e-2)
    assert second != pytest.approx(third, rel=1e-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_mistake_is_one_error_on_every_rank(ranks, backend):
    for number, found in enumerate(ranks(backend)("mistakes")):
        assert found["twice"].startswith("InvalidArgumentError: this optimizer")
        assert f"fit was called on rank {number} of 3 with an optimizer (SGD)" in found["undistributed"]
        assert "different numbers of steps per epoch (5 on rank 0, 6 on rank 1, 7 on rank 2)" in found["steps"]
        assert "before the first step of fit, the ranks disagree" in found["no broadcast"]
        assert "is not built yet" in found["unbuilt"]
        assert "differs between ranks 0, 2 and rank 1, by at most 0.0001" in found["nudged"]


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_saved_model_loads_with_and_without_hvdkit(ranks, alone, backend):
    found = ranks(backend)("round trip")
    for rank in found:
        assert (rank["before"], rank["class"], rank["same"]) == (5, "Adam", True)
        assert rank["weights"] == found[0]["weights"]
    assert alone(backend)("load") == [[[True, 5]] * 3]


@pytest.mark.parametrize("backend", BACKENDS)
def test_callbacks_resume_and_average(ranks, backend):
    first, *others = ranks(backend)("callbacks")
    assert others == [first, first]
    assert first["initial_epoch"] == 2 and first["epochs"] == [2, 3]
    assert first["val_accuracy"] == pytest.approx(first["all_samples"])


def test_warmup_logs_the_tutorials_rates(alone):
    assert alone("tensorflow")("warmup") == [[0.0333, 0.0567, 0.08, 0.08, 0.08]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_fit_in_one_call(ranks, backend):
    first, *others = ranks(backend)("fit")
    assert others == [first, first]
    assert first["losses"][-1] < first["losses"][0]


@pytest.mark.parametrize("backend", BACKENDS)
def test_process_set_averages_within_the_set(ranks, backend):
    assert ranks(backend)("process set") == [[3.0], [3.0], [6.0]]
