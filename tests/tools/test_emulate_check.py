"""What ranks give and must get, and what a rank does in a trial."""

from unittest.mock import MagicMock

import numpy as np
import pytest

from hvdkit import InvalidArgumentError
from hvdkit.core.communicator import shares
from hvdkit.core.compression import new_packing
from hvdkit.measure.emulate import engines
from hvdkit.measure.emulate.check import EXACT, Values, storage
from hvdkit.measure.emulate.plan import DTYPES, Collective, ReplayPlan
from hvdkit.measure.emulate.results import Delay, EmulateAsked
from hvdkit.measure.emulate.worker import WrongResultError
from hvdkit.measure.emulate.worker import replay as replay_job


def as_numbers(array, dtype):
    if dtype == "bfloat16":
        return (array.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)
    return array.astype(np.float64)


def test_gloo_asks_for_the_address_of_one_other_host_alone(tmp_path, monkeypatch):
    distributed, asked = MagicMock(), []
    distributed.FileStore.return_value.get = lambda name: name.encode()
    modules = {"torch": MagicMock(), "torch.distributed": distributed}
    monkeypatch.setattr(engines.importlib, "import_module", modules.__getitem__)
    monkeypatch.setattr(engines.launchers, "detect", lambda _: MagicMock(rank=1))
    monkeypatch.setattr(engines.bootstrap, "own_address", lambda *names: asked.extend(names) or "127.0.0.1")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    engines.over_torch(EmulateAsked("gloo", 4, hosts=4), tmp_path)
    assert asked == ["host0"] and engines.os.environ["GLOO_SOCKET_IFNAME"] == "lo"


# Values


@pytest.mark.parametrize("dtype", sorted(DTYPES))
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_the_sums_are_exact_in_every_type_and_in_any_order(dtype, ranks):
    values = Values("allreduce", 1000, dtype, ranks)
    given = [as_numbers(values.given(rank, 5), dtype) for rank in range(ranks)]
    assert values.given(0, 5).dtype == storage(dtype)
    expected = as_numbers(values.expected(ranks - 1, 5), dtype)
    assert np.array_equal(expected, sum(given))
    assert expected.max() <= EXACT[dtype]
    assert all((one == np.floor(one)).all() and one.min() >= 0 for one in given)


def test_many_ranks_in_half_precision_can_be_checked_up_to_what_it_holds():
    values = Values("allreduce", 100, "float16", 2000)
    assert np.array_equal(
        values.expected(0, 0).astype(int), sum(values.given(rank, 0).astype(int) for rank in range(2000))
    )
    plan = ReplayPlan((Collective("a", 100, "bfloat16"),))
    with pytest.raises(InvalidArgumentError, match=r"over 300 ranks cannot be checked in bfloat16.*--no-check"):
        engines.refuse(EmulateAsked("gloo", 300, hosts=1), plan)
    engines.refuse(EmulateAsked("gloo", 300, hosts=1, check=False), plan)
    assert Values("allreduce", 100, "bfloat16", 300).given(7, 0).shape == (100,)
    assert Values("broadcast", 100, "bfloat16", 300).expected(7, 0).shape == (100,)


def test_ranks_positions_and_trials_differ():
    values = Values("allreduce", 4096, "float32", 4)
    first = values.given(0, 0)
    assert (first != values.given(1, 0)).all()
    assert (first != values.given(0, 1)).all()
    for distance in (1, 7, 251, 256, 1024):  # a block that came to another place
        assert (first[distance:] != first[:-distance]).mean() > 0.9
    assert (values.expected(0, 0) != values.expected(0, 1)).any()


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_broadcast_and_all_to_all(ranks):
    values = Values("broadcast", 10, "int32", ranks)
    assert np.array_equal(values.expected(ranks - 1, 3), values.given(0, 3))
    values = Values("all_to_all", 10, "int32", ranks)
    ends = np.cumsum([0, *shares(10, ranks)])
    for rank in range(ranks):
        own = slice(ends[rank], ends[rank + 1])
        wanted = np.concatenate([values.given(sender, 3)[own] for sender in range(ranks)])
        assert np.array_equal(values.expected(rank, 3), wanted)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_element_is_named(dtype):
    values = Values("allreduce", 50, dtype, 2)
    right = values.expected(1, 4)
    assert values.wrong(right, 1, 4) is None
    broken = right.copy()
    broken[[17, 30]] = right[16]
    got, expected = as_numbers(right, dtype)[16:18]
    assert values.wrong(broken, 1, 4) == f"element 17 is {got:g}, expected {expected:g} (2 of 50 elements wrong)"
    assert values.wrong(right, 1, 5) is not None
    assert values.wrong(right[:48], 1, 4) == "it has 48 elements, expected 50"


@pytest.mark.parametrize("index", [0, 1, 49])
def test_no_element_is_left_out(index):
    values = Values("broadcast", 50, "float64", 2)
    broken = values.expected(0, 0).copy()
    broken[index] += 1
    assert values.wrong(broken, 0, 0).startswith(f"element {index} is ")


def test_a_long_array_is_made_in_blocks_that_are_no_copies_of_each_other():
    long, short = (Values("broadcast", count, "uint8", 2).given(0, 0) for count in (2_500_001, 1 << 20))
    assert len(long) == 2_500_001
    assert np.array_equal(long[: 1 << 20], short)
    for start in (1 << 20, 2 << 20):
        again = long[start : start + 400_000]
        assert (again != long[:400_000]).mean() > 0.9
        assert len(np.unique(again)) > 200


def test_shares_are_even():
    assert shares(650, 4) == [163, 163, 162, 162]
    assert shares(2, 3) == [1, 1, 0]


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("compression", ["fp16", "bf16", "int8"])
def test_what_packing_rounds_is_allowed_and_a_wrong_sum_is_not(ranks, compression):
    """Ranks of one process, whose alltoall and allgather are rows of arrays."""
    values = Values("allreduce", 3000, "float32", ranks)
    packings = [new_packing(compression, [("one", 3000)], rank, ranks, saves=False) for rank in range(ranks)]
    for trial in range(30):  # int8 adds what was lost before
        parts = np.array([one.pack(values.given(rank, trial)) for rank, one in enumerate(packings)])
        means = np.array([one.add_up(parts[:, rank].copy(), 1.0) for rank, one in enumerate(packings)])
        got = np.empty(3000, np.float32)
        packings[0].unpack(means, got)
        assert values.wrong(got, 0, trial, compression) is None
        if compression != "fp16":
            assert values.wrong(got, 0, trial) is not None, "it was rounded"
        assert values.wrong(got, 0, trial + 60, compression) is not None
        assert values.wrong(np.roll(got, 1), 0, trial, compression) is not None
        assert values.wrong(got + values.given(0, trial), 0, trial, compression) is not None
        got[7] = np.nan
        assert values.wrong(got, 0, trial, compression).startswith("element 7 is nan")


# A trial


class Alone:
    """An engine of one rank, whose results can be spoilt."""

    rank, size, notes = 0, 1, ()

    def __init__(self, overlaps=False, spoil=None):
        self.overlaps, self.spoil, self.calls = overlaps, spoil, []

    def operation(self, index, collective, elements, dtype):
        return AloneOperation(self, index, elements)

    def barrier(self):
        self.calls.append("barrier")


class AloneOperation:
    def __init__(self, engine, index, elements):
        self.engine, self.index = engine, index
        self.loads = 0

    def load(self, values):
        self.array = values.copy()
        self.loads += 1

    def start(self):
        self.engine.calls.append(f"start {self.index}")

    def finish(self, _):
        self.engine.calls.append(f"finish {self.index}")
        if self.engine.spoil == (self.loads - 1, self.index):
            self.array[2] += 1
        return self.array

    def as_array(self, result):
        return result


def replay(engine, **options):
    plan = ReplayPlan((Collective("fc4", 5), Collective("fc3", 7)), trials=options.pop("trials", 2))
    kept = []
    asked = EmulateAsked("mpi", 1, hosts=1, **options)
    replay_job(asked, plan, engine, lambda *times: kept.append(times))
    return kept


def test_collectives_one_by_one_after_a_barrier_and_the_warm_up_is_not_kept():
    engine = Alone()
    kept = replay(engine, warmup_trials=1)
    one = ["barrier", "start 0", "finish 0", "start 1", "finish 1"]
    assert engine.calls == one * 3
    assert len(kept) == 2
    for arrived, done in kept:
        assert arrived[0] <= done[0] <= arrived[1] <= done[1]


def test_an_engine_that_overlaps_is_given_all_before_the_first_is_waited_for():
    engine = Alone(overlaps=True)
    ((arrived, done),) = replay(engine, trials=1)
    assert engine.calls == ["barrier", "start 0", "start 1", "finish 0", "finish 1"]
    assert arrived[0] <= arrived[1] <= done[0] <= done[1]


@pytest.mark.parametrize("spoil", [(0, 0), (3, 1)])
def test_a_wrong_result_names_rank_collective_trial_and_element(spoil):
    with pytest.raises(WrongResultError) as found:
        replay(Alone(spoil=spoil), trials=3, warmup_trials=1)
    when = "the warm-up" if spoil[0] == 0 else "trial 2"
    name = "fc4, 20 bytes" if spoil[1] == 0 else "fc3, 28 bytes"
    assert f"Rank 0 got a wrong result of allreduce {spoil[1]} ({name} of float32) in {when}: element 2 is" in str(
        found.value
    )


@pytest.mark.parametrize("where", ["values", "engine"])
def test_sizes_beyond_memory_are_a_mistake_in_one_sentence(monkeypatch, where):
    def fail(*_, **__):
        raise MemoryError("Unable to allocate 1 PiB")

    engine = Alone()
    if where == "values":
        monkeypatch.setattr("hvdkit.measure.emulate.worker.Values", fail)
    else:
        engine.operation = fail
    with pytest.raises(InvalidArgumentError, match=r"Rank 0 has no memory for the 48 bytes of a step \(Unable"):
        replay(engine)


def test_a_compressed_step_follows_each_step_and_its_times_follow_those():
    engine = Alone()
    engine.compressed = lambda index, compression, elements, dtype: AloneOperation(engine, f"{compression} {index}", 0)
    kept = replay(engine, compression="int8")
    one = ["barrier", "start 0", "finish 0", "start 1", "finish 1"]
    other = ["barrier", "start int8 0", "finish int8 0", "start int8 1", "finish int8 1"]
    assert engine.calls == (one + other) * 2
    for arrived, done in kept:
        assert len(arrived) == len(done) == 4 and arrived == sorted(arrived)


def test_a_wrong_compressed_result_is_named_as_such():
    engine = Alone(spoil=(0, "int8 1"))
    engine.compressed = lambda index, compression, elements, dtype: Far(engine, f"{compression} {index}", 0)
    with pytest.raises(
        WrongResultError, match=r"allreduce 1 \(fc3, 28 bytes of float32\) with int8 in trial 0: element"
    ):
        replay(engine, compression="int8")


class Far(AloneOperation):
    """Spoilt by more than int8 rounds."""

    def finish(self, handle):
        before = self.array.copy()
        after = super().finish(handle)
        return before + 100 * (after - before)


def test_without_a_check_it_is_not_seen():
    assert len(replay(Alone(spoil=(0, 0)), trials=3, check=False)) == 3


def test_a_straggler_and_random_delays_come_before_the_arrival(monkeypatch):
    slept = []
    monkeypatch.setattr("hvdkit.measure.emulate.worker.time.sleep", slept.append)
    replay(Alone(), straggler_s={0: 0.05, 3: 9.0})
    assert slept == [0.05] * 4
    slept.clear()
    replay(Alone(), delay=Delay(0.02, None, 0.5), trials=500)
    assert 400 < len(slept) < 600
    assert 0.017 < sum(slept) / len(slept) < 0.023
    again = list(slept)
    slept.clear()
    replay(Alone(), delay=Delay(0.02, None, 0.5), trials=500)
    assert slept == again
    slept.clear()
    replay(Alone(), delay=Delay(0.02, 2), trials=5)
    assert slept == []
