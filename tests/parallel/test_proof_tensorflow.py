"""hvdkit.tensorflow proves that ranks agree: desynchronised ranks, seeds, statistics, uneven work, on real ranks."""

import importlib.util

import pytest

MISSING = [name for name in ("tensorflow", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_proof_tensorflow.py"
SIDES = {2: "between rank 0 and rank 1", 3: "between ranks 0, 2 and rank 1"}
LAST = {2: "between rank 0 and rank 1", 3: "between ranks 0-1 and rank 2"}


@pytest.fixture
def alone(once):
    return once("alone", 1)[0]


@pytest.fixture(params=[2, 3])
def ranks(once, request):
    """Two ranks over MPI, three over Gloo."""
    return once("together", request.param, controller="mpi" if request.param == 2 else "gloo")


def test_a_nudged_weight_is_reported_on_every_rank_at_the_next_check(ranks):
    for rank in (rank["raised"] for rank in ranks):
        assert rank["error"].startswith("AgreementError: after step 4, the ranks disagree: ")
        sides = SIDES[len(ranks)]
        assert f"last/kernel differs {sides}, by at most 0.0001; broadcast before training" in rank["error"]
        assert rank["steps"] == 4 and rank["warned"] == []


def test_a_disagreement_can_be_a_warning(ranks):
    for rank in (rank["warned"] for rank in ranks):
        assert rank["error"] == "" and rank["steps"] == 6
        after_four, after_six = rank["warned"]
        assert after_four.startswith("after step 4, the ranks disagree: ") and "last/kernel differs" in after_four
        assert after_six.startswith("after step 6, ")


def test_everything_that_can_differ_is_named(ranks):
    between = f"differs {LAST[len(ranks)]}, by at most"
    for rank in (rank["disagreements"] for rank in ranks):
        assert rank["nothing"] == ""
        assert f"first_kernel_velocity {between} 0.0001" in rank["slot"]
        assert f"/learning_rate {between} 0.01" in rank["rate"]
        assert f"optimizer.beta_1 {between} 0.1" in rank["setting"]
        assert f"loader.epoch {between} 6; shard the same data set" in rank["epoch"]
        assert f"norm/gamma {between} 0.0001" in rank["gamma"]
        assert f"seed_everything's seed {between} 1; call seed_everything" in rank["seed"]
        assert f"TensorFlow seeded anew {between} 1" in rank["seeded anew"]
        assert "seeded with 5 after seed_everything" in rank["all seeded anew"]
        assert "optimizer.learning_rate.initial_learning_rate differs" in rank["schedule"]
        assert all("signs differs" in rank[kind] and "by at most 2;" in rank[kind] for kind in ("float64", "float32"))
        assert "zero differs" in rank["sign of zero"] and "by at most 0;" in rank["sign of zero"]


def test_batch_normalization_keeps_its_own_statistics_until_they_are_averaged(ranks):
    found = [rank["statistics"] for rank in ranks]
    mean = [sum(values) / len(found) for values in zip(*(rank["local"] for rank in found), strict=True)]
    assert found[0]["local"] != found[1]["local"]
    for rank in found:
        assert rank["checked"] == ["", "", ""] and rank["after averaging"] == ""
        assert "norm/moving_mean differs between" in rank["with statistics"]
        assert "norm/gamma differs between" in rank["frozen gamma"]
        assert rank["averaged"] == pytest.approx(mean, rel=1e-6)


def test_join_waits_for_the_rank_with_the_most_steps(ranks):
    last = len(ranks) - 1
    found = [rank["joined"] for rank in ranks]
    assert [(rank["last"], rank["steps"]) for rank in found] == [(last, last + 3)] * len(found)
    assert all(rank["weights"] == found[0]["weights"] for rank in found)


def test_fit_trains_on_every_sample_once_like_one_process(alone, ranks):
    for rank in ranks:
        assert rank["fit"]["weights"] == pytest.approx(alone["fit"]["weights"], rel=1e-5, abs=1e-6)
        assert rank["fit"]["losses"] == pytest.approx(alone["fit"]["losses"], rel=1e-5)


def test_seeds_give_the_same_model_and_different_streams_again_in_every_run(once):
    first, again = [rank["seeds"] for rank in once("together", 2, controller="mpi")], once("seeds", 2, seed=11)
    (other,) = once("seeds", 1, seed=12)
    assert first == again
    for name in ("initial", "made before"):
        assert first[0][name] == first[1][name] != other[name]
    runs = [*first, other]
    numbers = [number for rank in runs for number in rank["drawn"]]
    assert len(set(numbers)) == len(numbers) == 3 * 7
    masks = [tuple(mask) for rank in runs for mask in rank["dropout"]]
    assert len(set(masks)) == len(masks) == 3 * 2
    assert all(rank["moved once"] for rank in runs)
    assert [text.split(",")[0] for text in other["bad"]] == ["InvalidArgumentError: seed must be an integer >= 0"] * 3


def test_weighted_losses(alone):
    found = alone["losses"]
    assert found["means"] == pytest.approx([found["expected"]] * 5)
    assert found["unweighted"] == pytest.approx(0) and found["images"] == pytest.approx([0, 0], abs=1e-7)
    assert found["reduction"] == "sum_over_batch_size"
    assert found["ignored"] == 0  # the only sample of another class has weight 0
    parts = (
        "got 'sum'",
        "got 'mean_with_sample_weight'",
        "ignore_class=0 divides",
        "got 'mse'; for a name use keras.losses.get",
        "got (2,) for (3,)",
        "got (3, 1) for (3,)",
        "a single number",
        "the output has a mask",
    )
    for error, part in zip(found["errors"], parts, strict=True):
        assert error.startswith("InvalidArgumentError") and part in error


def test_digests_tell_every_type_and_shape_apart(alone):
    assert alone["digests"] == []


def test_without_seed_everything_random_streams_stay_as_they_are(alone):
    assert alone["untouched"]


def test_mistakes_are_single_errors(alone):
    every, reaction, loader, optimizer, step, join = alone["mistakes"]
    assert [error.partition(", got ")[2].partition(";")[0] for error in (every, reaction, loader, optimizer)] == [
        "0.",
        "'stop'.",
        "list",
        "str.",
    ]
    assert "CheckAgreement's step cannot run inside tf.function" in step
    assert "join cannot run inside tf.function" in join


def test_horovods_synchronised_batch_normalisation_fails_on_keras_3(alone):
    assert "SyncBatchNormalization" in alone["sync"]
