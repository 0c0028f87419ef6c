"""Steps 7 and 8: shards and steps per epoch."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdkit import CheckpointError, InvalidArgumentError, Topology
from hvdkit.steps import passes
from hvdkit.steps.shards import Position, Shard, steps_per_epoch, stream_weights
from hvdkit.steps.streams import StreamInEpochs, StreamPosition, StreamShare

SIZES = {"n_samples": st.integers(1, 300), "size": st.integers(1, 9), "batch_size": st.integers(1, 40)}


def epoch_of(n_samples, size, batch_size, remainder, epoch=0, shuffle=True, seed=0):
    """Every rank's batches of one epoch: [rank][step]."""
    return [
        list(Shard(n_samples, Topology(rank, size), batch_size, remainder, shuffle, seed).batches(epoch))
        for rank in range(size)
    ]


def samples(ranks):
    return Counter(int(index) for batches in ranks for batch in batches if batch.weight > 0 for index in batch.indices)


@given(**SIZES, epoch=st.integers(0, 5))
def test_exact_uses_every_sample_once(n_samples, size, batch_size, epoch):
    ranks = epoch_of(n_samples, size, batch_size, "exact", epoch)
    assert samples(ranks) == Counter(range(n_samples))


@given(**SIZES)
def test_an_evaluation_deals_out_the_batches_of_one_process(n_samples, size, batch_size):
    dealt = [Shard(n_samples, Topology(rank, size), batch_size, "pad").once() for rank in range(size)]
    in_turn = [batch.tolist() for step in range(len(dealt[0])) for rank in dealt for batch in rank[step : step + 1]]
    assert in_turn == [list(range(n_samples))[at : at + batch_size] for at in range(0, n_samples, batch_size)]


@given(**SIZES, epoch=st.integers(0, 5))
def test_exact_weights_make_the_mean_over_ranks_the_mean_over_the_global_batch(n_samples, size, batch_size, epoch):
    loss = np.random.default_rng(0).normal(size=n_samples)
    ranks = epoch_of(n_samples, size, batch_size, "exact", epoch)
    for step in zip(*ranks, strict=True):
        mean_over_ranks = np.mean([np.mean(batch.weight * loss[batch.indices]) for batch in step])
        used = np.concatenate([batch.indices for batch in step if batch.weight > 0])
        assert mean_over_ranks == pytest.approx(loss[used].mean(), rel=1e-12, abs=1e-12)


@given(**SIZES, epoch=st.integers(0, 5))
def test_drop_is_disjoint_with_full_batches_only(n_samples, size, batch_size, epoch):
    if n_samples < size * batch_size:
        with pytest.raises(InvalidArgumentError, match="fewer than one global batch"):
            epoch_of(n_samples, size, batch_size, "drop", epoch)
        return
    ranks = epoch_of(n_samples, size, batch_size, "drop", epoch)
    used = samples(ranks)
    assert set(used.values()) == {1}
    assert n_samples - len(used) < size * batch_size
    assert {len(batch.indices) for batches in ranks for batch in batches} == {batch_size}


@given(**SIZES, epoch=st.integers(0, 5))
def test_pad_is_complete_with_full_batches_only(n_samples, size, batch_size, epoch):
    ranks = epoch_of(n_samples, size, batch_size, "pad", epoch)
    used = samples(ranks)
    assert set(used) == set(range(n_samples))
    assert used.total() == steps_per_epoch(n_samples, batch_size, Topology(0, size), "pad") * size * batch_size
    assert max(used.values()) - min(used.values()) <= 1
    assert {len(batch.indices) for batches in ranks for batch in batches} == {batch_size}


@given(**SIZES, remainder=st.sampled_from(["drop", "pad", "exact"]), epoch=st.integers(0, 3))
def test_every_rank_takes_the_promised_number_of_steps(n_samples, size, batch_size, remainder, epoch):
    if remainder == "drop" and n_samples < size * batch_size:
        return
    promised = steps_per_epoch(n_samples, batch_size, Topology(0, size), remainder)
    ranks = epoch_of(n_samples, size, batch_size, remainder, epoch)
    assert [len(batches) for batches in ranks] == [promised] * size
    assert all(len(batch.indices) >= 1 for batches in ranks for batch in batches)


def test_n_ranks_see_in_each_step_what_one_process_with_the_n_fold_batch_sees():
    (alone,) = epoch_of(60, 1, 12, "exact", epoch=2)
    ranks = epoch_of(60, 3, 4, "exact", epoch=2)
    for whole, parts in zip(alone, zip(*ranks, strict=True), strict=True):
        assert sorted(whole.indices) == sorted(np.concatenate([part.indices for part in parts]))


def test_the_order_changes_each_epoch_and_with_the_seed_and_comes_back():
    shard = Shard(100, Topology(0, 2), 5)
    assert not np.array_equal(shard.order(0), shard.order(1))
    assert not np.array_equal(shard.order(0), Shard(100, Topology(0, 2), 5, seed=1).order(0))
    assert np.array_equal(shard.order(3), Shard(100, Topology(1, 2), 5).order(3))


def test_another_end_is_dropped_each_epoch():
    dropped = {frozenset(range(10)) - set(samples(epoch_of(10, 1, 4, "drop", epoch))) for epoch in range(10)}
    assert len(dropped) > 1


def test_without_shuffle_the_order_is_the_data_sets():
    ranks = epoch_of(8, 2, 2, "exact", epoch=7, shuffle=False)
    assert [[batch.indices.tolist() for batch in batches] for batches in ranks] == [[[0, 1], [4, 5]], [[2, 3], [6, 7]]]


def test_a_rank_without_a_sample_gets_a_filler_of_weight_zero():
    ranks = epoch_of(5, 4, 1, "exact", shuffle=False)
    last = [batches[-1] for batches in ranks]
    assert [batch.weight for batch in last] == [4.0, 0.0, 0.0, 0.0]
    assert [len(batch.indices) for batch in last] == [1, 1, 1, 1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 4), "n_samples must be an integer >= 1, got 0"),
        ((10, 0), "batch_size must be an integer >= 1, got 0"),
        ((10, -3), "got -3"),
        ((10, 2.0), "got 2.0"),
        ((10, True), "got True"),
        ((3, 2), "3 samples are fewer than one global batch of 2 x 2 ranks"),
    ],
)
def test_numbers_that_cannot_be_are_refused(arguments, message):
    with pytest.raises(InvalidArgumentError, match=message):
        steps_per_epoch(*arguments, Topology(0, 2))
    with pytest.raises(InvalidArgumentError, match=message):
        Shard(arguments[0], Topology(0, 2), arguments[1])


def test_scalars_of_numpy_are_plain_numbers():
    share = Shard(np.int64(23), Topology(0, 2), np.int32(4), seed=np.uint8(3))
    assert share == Shard(23, Topology(0, 2), 4, seed=3)
    json.dumps(Position(1).after(share, 2).state(share))
    assert steps_per_epoch(np.int64(23), np.int32(4), Topology(0, 2)) == 2


def test_an_unknown_policy_a_bad_seed_and_a_bad_epoch_are_refused():
    with pytest.raises(InvalidArgumentError, match="drop, pad, exact, got 'keep'"):
        steps_per_epoch(10, 2, Topology(0, 2), "keep")
    with pytest.raises(InvalidArgumentError, match="seed"):
        Shard(10, Topology(0, 2), 2, seed=-1)
    with pytest.raises(InvalidArgumentError, match="epoch"):
        Shard(10, Topology(0, 2), 2).order(-1)


def test_steps_over_streams_are_weighted_by_what_each_rank_has():
    assert stream_weights([4, 4], 4, "drop") == [1.0, 1.0]
    assert stream_weights([4, 3], 4, "drop") is None
    assert stream_weights([4, 3, 0], 4, "exact") == [12 / 7, 9 / 7, 0.0]
    assert stream_weights([4, 4], 4, "exact") == [1.0, 1.0]
    assert stream_weights([0, 0], 4, "exact") is None


def test_what_all_ranks_must_share_is_named():
    facts = [Shard(53, Topology(rank, 3), 4, "exact", seed=2).facts(epoch=5) for rank in range(3)]
    assert facts[0] == facts[1] == facts[2]
    assert (facts[0]["loader.epoch"], facts[0]["loader.seed"], facts[0]["loader.n_samples"]) == (5, 2, 53)
    assert Shard(53, Topology(0, 3), 4, "pad", seed=2).facts(epoch=5) != facts[0]


@given(
    st.integers(1, 60), st.integers(1, 4), st.integers(1, 4), st.integers(1, 5), st.integers(1, 5), st.integers(0, 8)
)
def test_another_number_of_ranks_goes_on_where_the_first_stopped(n_samples, size, other, batch, other_batch, steps):
    def share(rank, size, batch):
        return Shard(n_samples, Topology(rank, size), batch, "exact", seed=1)

    def trained(shares, position, steps=None):
        rounds = list(zip(*(one.batches(position.epoch, position.samples) for one in shares), strict=True))
        return [i for batches in rounds[:steps] for one in batches if one.weight for i in one.indices.tolist()]

    first, second = ([share(r, n, b) for r in range(n)] for n, b in ((size, batch), (other, other_batch)))
    stopped = Position().after(first[0], min(steps, len(first[0])))
    before = trained(first, Position(), steps)
    after = trained(second, stopped) if stopped.epoch == 0 else []
    assert sorted(before + after) == list(range(n_samples))
    assert stopped.epoch == (len(before) == n_samples)
    assert stopped.steps(first[0]) == min(steps, len(first[0]))


def test_a_position_counts_the_steps_of_another_size():
    one, four = (Shard(100, Topology(0, size), 5) for size in (1, 4))
    position = Position(2, 60)
    assert position.steps(one) == 2 * 20 + 12 and position.steps(four) == 2 * 5 + 3
    with pytest.raises(InvalidArgumentError, match="position must be an integer >= 0, got -1"):
        list(one.batches(0, -1))


def test_a_position_is_kept_as_plain_values_and_belongs_to_its_data():
    share, other_seed = Shard(100, Topology(0, 2), 5, seed=1), Shard(100, Topology(0, 2), 5, seed=2)
    state = Position(2, 60).state(share)
    older = {"epoch": 2, "position": 60, "samples": 260, "n_samples": 100, "seed": 1}
    assert state == {**older, "sampler": None, "shuffle": True}
    assert Position.of(state, share) == Position(2, 60)
    assert Position.of({**state, "position": 100}, share) == Position(3, 0)
    with pytest.raises(CheckpointError, match="data had seed=1, this loader has 2"):
        Position.of(state, other_seed)
    sequential = Shard(100, Topology(0, 2), 5, shuffle=False, seed=1)
    with pytest.raises(CheckpointError, match="data had shuffle=True, this loader has False"):
        Position.of(state, sequential)
    assert Position.of(older, sequential) == Position(2, 60)  # written before the order was
    for bad in ({**state, "epoch": -1}, {**state, "position": "x"}, {"n_samples": 100, "seed": 1}):
        with pytest.raises(CheckpointError, match="position in the data is none"):
            Position.of(bad, share)


def test_a_stream_goes_on_where_its_state_was_taken():
    def stream(**changed):
        given = {"remainder": "drop", "buffer": 0, "seed": 1, "by_files": False, **changed}
        made = StreamInEpochs()
        made._begin_stream(StreamShare(Topology(0, 2), 5, **given), lambda name: None)
        return made

    one, other = stream(), stream()
    one.load_state(StreamPosition(2, 60, 200, order=7).state(one.share))
    assert one.position == StreamPosition(2, 60, 200, order=7) and one.steps_done == 6
    other.load_state(one.state())
    assert other.state() == one.state() and other.require_state(one.state()) == one.position
    other.set_epoch(2)
    assert other.position == one.position  # the rest of it
    other.set_epoch(1)
    assert other.position == StreamPosition(1) and other.epoch == 1
    for wrong, match in ((stream(seed=2), "stream had seed=1, this one has 2"), (stream(by_files=True), "stream had")):
        with pytest.raises(CheckpointError, match=match):
            wrong.load_state(one.state())


def test_a_model_that_is_gone_is_looked_at_no_more():
    class Model:
        pass

    kept, gone = Model(), [Model() for _ in range(9)]
    before = len(passes._models)
    for model in (kept, *gone):
        passes.look_at_weights(model, lambda _: b"weights")
    assert len(passes._models) == before + 10
    del model
    gone.clear()
    assert len(passes._models) == before + 1
