"""hvdkit.torch proves that the ranks agree: desynchronised ranks, seeds, statistics, uneven work, on real ranks."""

import importlib.util

import pytest

MISSING = [name for name in ("torch", "horovod") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.parallel,
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)} (`make test` installs all)"),
]

PROGRAM = "programs_proof_torch.py"


@pytest.mark.parametrize("n", [2, 3])
def test_a_nudged_weight_is_reported_on_every_rank_at_the_next_check(run_ranks, n):
    sides = {2: "between rank 0 and rank 1", 3: "between ranks 0, 2 and rank 1"}
    for rank in run_ranks(PROGRAM, "injected", n, reaction="raise"):
        assert rank["error"].startswith("AgreementError: after step 4, the ranks disagree: 4.weight differs")
        assert f"differs {sides[n]}, by at most 0.0001; broadcast before training" in rank["error"]
        assert rank["steps"] == 4 and rank["warned"] == []


def test_a_disagreement_can_be_a_warning(run_ranks):
    for rank in run_ranks(PROGRAM, "injected", 2, reaction="warn"):
        assert rank["error"] == "" and rank["steps"] == 6
        after_four, after_six = rank["warned"]
        assert "after step 4, the ranks disagree: 4.weight" in after_four and "after step 6" in after_six


def test_everything_that_can_differ_is_named(run_ranks):
    for rank in run_ranks(PROGRAM, "disagreements", 2):
        assert rank["nothing"] == ""
        between = "differs between rank 0 and rank 1, by at most"
        assert f"optimizer.state.0.exp_avg {between} 0.0001" in rank["slot"]
        assert f"optimizer.param_groups.0.lr {between} 0.01" in rank["rate"]
        assert f"loader.epoch {between} 6; shard the same data set" in rank["epoch"]
        assert f"scale {between} 2" in rank["buffer"]
        assert f"scale {between} 0;" in rank["sign of zero"]
        assert f"seed_everything's seed {between} 1; call seed_everything" in rank["seed"]
        assert f"torch seeded anew {between} 1" in rank["seeded anew"]
        assert "seeded with 5 after seed_everything" in rank["all seeded anew"]
        assert all(f"signs {between} 2;" in rank[kind] for kind in ("float64", "float32"))


def test_batch_norm_statistics(run_ranks):
    ranks = run_ranks(PROGRAM, "statistics", 2)
    mean = [(first + second) / 2 for first, second in zip(ranks[0]["local"], ranks[1]["local"], strict=True)]
    assert ranks[0]["local"] != ranks[1]["local"]
    for rank in ranks:
        assert rank["checked"] == rank["after averaging"] == rank["synchronised"] == ""
        assert "1.running_mean differs between rank 0 and rank 1" in rank["with statistics"]
        assert rank["averaged"] == pytest.approx(mean)
        assert rank["off"] < 1e-5 and rank["evaluated"] < 1e-5
        assert rank["running"][0] == pytest.approx(rank["running"][1], rel=1e-5, abs=1e-6)
        assert "Linear has no BatchNorm" in rank["none"]


def test_seeds_give_the_same_model_and_different_streams_again_in_every_run(run_ranks):
    first, again, other = (run_ranks(PROGRAM, "seeds", 3, seed=seed) for seed in (11, 11, 12))
    assert first == again
    assert first[0]["initial"] == first[1]["initial"] == first[2]["initial"] != other[0]["initial"]
    runs = [*first, *other]
    numbers = [number for rank in runs for number in rank["drawn"]]
    numbers += [number for rank in runs for batch in rank["workers"] for number in batch]
    # 6 runs of 4 draws, and of 2 epochs of 2 batches (of 8 samples on 3 ranks, 1 batch) of 2 samples of 3 draws
    assert len(set(numbers)) == len(numbers) == 6 * (4 + 2 * 1 * 2 * 3)
    assert len({tuple(rank["dropout"]) for rank in runs}) == 6
    assert [text.split(",")[0] for text in first[0]["bad"]] == [
        "InvalidArgumentError: seed must be an integer >= 0"
    ] * 3


def test_join_waits_for_the_rank_with_the_most_steps(run_ranks):
    ranks = run_ranks(PROGRAM, "joined", 3)
    assert [rank["last"] for rank in ranks] == [2, 2, 2]
    assert ranks[0]["weights"] == ranks[1]["weights"] == ranks[2]["weights"]


def test_streams_of_unknown_length_take_the_same_steps(run_ranks):
    short, long = run_ranks(PROGRAM, "streams", 2)
    assert (short["drop"], long["drop"]) == ([[0.0, 1.0]], [[10.0, 11.0]])
    assert short["exact"] == [
        [[0.0, 1.0], [1.0, 1.0]],
        [[2.0], [pytest.approx(2 / 3)]],
        [[2.0], [0.0]],
        [[2.0], [0.0]],
    ]
    assert long["exact"] == [
        [[10.0, 11.0], [1.0, 1.0]],
        [[12.0, 13.0], [pytest.approx(4 / 3)] * 2],
        [[14.0, 15.0], [2.0, 2.0]],
        [[16.0], [2.0]],
    ]
    for rank in (short, long):
        assert "the data set of rank 1 is empty" in rank["empty"]
        assert "remainder must be drop or exact" in rank["pad"]
        assert "batch_size must be an integer >= 1, got 0" in rank["size"]


def test_weighted_losses(run_ranks):
    (found,) = run_ranks(PROGRAM, "losses", 1)
    assert found["means"] == pytest.approx([found["expected"]] * 4)
    assert found["unweighted"] == pytest.approx(0) and found["images"] == pytest.approx(0, abs=1e-7)
    parts = ("got 'sum'", "class weights divides", "ignore_index=-100", "got (2,) for (3,)", "a single number")
    for error, part in zip(found["errors"], parts, strict=True):
        assert error.startswith("InvalidArgumentError") and part in error
    assert [error.partition(", got ")[2] for error in found["every"]] == ["0.", "'stop'.", "list."]


def test_digests_tell_every_type_and_shape_apart(run_ranks):
    assert run_ranks(PROGRAM, "digests", 1) == [[]]
