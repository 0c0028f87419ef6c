"""The mean of gradients over ranks that are threads: packing, types, weights, what is missing, fp16, errors."""

import importlib.util
from pathlib import Path
from types import SimpleNamespace

import array_ranks
import numpy as np
import pytest
from array_ranks import on_ranks

from hvdkit.arrays import buffers, mpi, shared_memory
from hvdkit.arrays.buffers import sent_as
from hvdkit.arrays.optimizer import Reduce
from hvdkit.errors import AgreementError, InvalidArgumentError
from hvdkit.steps.gradients import GradientOptions


@pytest.fixture(autouse=True)
def threads_for_ranks(monkeypatch):
    monkeypatch.setattr(mpi, "library", lambda: array_ranks.MPI)


@pytest.fixture(params=["short", "long", "shared"])
def length(request, monkeypatch):
    """All ways: one message with its head; the head before pieces of three values, by MPI or in shared memory."""
    if request.param != "short":
        monkeypatch.setattr(buffers, "SHORT_BYTES", 0)
        monkeypatch.setattr(buffers, "CHUNK_BYTES", 12)
        monkeypatch.setattr(shared_memory, "PIECE_BYTES", 20)
    monkeypatch.setattr(array_ranks, "ONE_HOST", [request.param == "shared"])
    return request.param


def make(comm, parameters, *, threaded=False, **options):
    return Reduce(parameters, GradientOptions(**options), comm, threaded=threaded)


def parameters():
    return {"w": np.zeros((2, 3), np.float32), "b": np.zeros(4, np.float32), "s": np.zeros((), np.float32)}


def gradients(rank):
    """Small whole numbers, which every type holds exactly."""
    rng = np.random.default_rng(rank)
    return {name: rng.integers(-8, 9, one.shape).astype(np.float32) for name, one in parameters().items()}


def mean(size, weights=None, op="average"):
    weights = [1.0] * size if weights is None else weights
    total = sum(weights) if op == "average" else 1.0
    return {
        name: sum(weight * gradients(rank)[name].astype(np.float64) for rank, weight in enumerate(weights)) / total
        for name in parameters()
    }


def assert_equal(found, expected, **tolerance):
    assert found.keys() == expected.keys()
    for name in expected:
        assert found[name].shape == expected[name].shape
        np.testing.assert_allclose(found[name], expected[name], **(tolerance or {"rtol": 1e-6, "atol": 1e-6}))


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("op", ["average", "sum"])
def test_mean_and_sum(length, size, op):
    for found in on_ranks(size, lambda comm: make(comm, parameters(), op=op)(gradients(comm.rank))):
        assert_equal(found, mean(size, op=op))


@pytest.mark.parametrize("weights", [[3, 5], [1, 0, 2], [0.25, 0.5, 0.125]])
def test_unequal_weights_are_exact(length, weights):
    def rank(comm):
        return make(comm, parameters())(gradients(comm.rank), weight=weights[comm.rank])

    for found in on_ranks(len(weights), rank):
        assert_equal(found, mean(len(weights), weights))


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("in_buffers", [False, True])
def test_gradients_of_weight_0_may_be_nan(length, passes, in_buffers):
    """The mean over no samples is 0 / 0."""
    if passes == 2 and in_buffers:
        pytest.skip("several passes have no buffers")

    def rank(comm):
        reduce = make(comm, parameters(), backward_passes_per_step=passes)
        given = {name: one + np.nan if comm.rank == 0 else one for name, one in gradients(comm.rank).items()}
        if in_buffers:
            for name, one in given.items():
                reduce.buffers[name][...] = one
            given = reduce.buffers
        for _ in range(passes):
            found = reduce(given, weight=0 if comm.rank == 0 else 5)
        return found

    for found in on_ranks(2, rank):
        assert_equal(found, {name: passes * one for name, one in mean(2, [0, 5]).items()})


def test_one_rank_alone_needs_no_weight():
    (found,) = on_ranks(1, lambda comm: make(comm, parameters())(gradients(0), weight=7))
    assert_equal(found, gradients(0))


def test_every_type_travels_and_comes_back_as_it_was(length):
    kinds = ["f2", "f4", "f8", "c8", "c16", ">f4"]
    if importlib.util.find_spec("ml_dtypes"):
        kinds.append(_dtype("bfloat16"))
    given = [np.arange(5).astype(kind) for kind in kinds]

    def rank(comm):
        return make(comm, given)([one * (1 + comm.rank) for one in given])

    for found in on_ranks(2, rank):
        for one, expected in zip(found, given, strict=True):
            assert one.dtype == expected.dtype
            np.testing.assert_array_equal(one.astype("c16"), np.arange(5) * 1.5)


def test_a_gradient_may_have_another_type_and_layout_than_its_parameter():
    def rank(comm):
        turned = np.asfortranarray(np.arange(6.0).reshape(2, 3))
        return make(comm, {"w": np.zeros((2, 3), np.float32)})({"w": turned})

    for found in on_ranks(2, rank):
        assert found["w"].dtype == np.float32 and found["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_missing_gradients_count_as_zeros_and_stay_missing_where_all_miss_them(length):
    def rank(comm):
        given = gradients(comm.rank)
        given["s"] = None
        if comm.rank == 1:
            given["b"] = None
        reduce = make(comm, parameters())
        first = {name: None if one is None else one.copy() for name, one in reduce(given).items()}
        return first, reduce(gradients(comm.rank))

    for first, second in on_ranks(3, rank):
        assert first["s"] is None
        np.testing.assert_allclose(first["b"], (gradients(0)["b"] + gradients(2)["b"]) / 3, rtol=1e-6)
        np.testing.assert_allclose(first["w"], mean(3)["w"], rtol=1e-6)
        assert_equal(second, mean(3))


@pytest.mark.parametrize("count", [9, 10, 26])
def test_the_head_has_room_for_each_of_many_gradients(length, count):
    """With its flags: a cache line, one number more, and more lines."""

    def rank(comm):
        reduce = make(comm, [np.zeros(2, np.float32)] * count)
        found = reduce([*(np.full(2, float(comm.rank)) for _ in range(count - 1)), None if comm.rank else np.ones(2)])
        return [one.tolist() for one in found]

    assert on_ranks(2, rank) == [[[0.5, 0.5]] * count] * 2


def test_none_among_the_parameters_stays_none():
    def rank(comm):
        reduce = make(comm, [None, np.zeros(2), {"x": None}])
        found = reduce([None, np.ones(2), {"x": None}])
        found[1] = found[1].copy()
        return found, _error(lambda: reduce([np.ones(1), np.ones(2), {"x": None}]))

    for found, error in on_ranks(2, rank):
        assert found[0] is None and found[2] == {"x": None} and found[1].tolist() == [1, 1]
        assert "give distribute that parameter" in error


@pytest.mark.parametrize("weights", [None, [[1, 2], [3, 4]]])
def test_gradients_of_several_passes_are_added_up(length, weights):
    def rank(comm):
        reduce = make(comm, parameters(), backward_passes_per_step=2)
        given = [None, None] if weights is None else weights[comm.rank]
        for _ in range(2):
            nothing = reduce(gradients(2 * comm.rank), weight=given[0])
            found = reduce(gradients(2 * comm.rank + 1), weight=given[1])
        return nothing, found

    flat = [1, 1, 1, 1] if weights is None else [*weights[0], *weights[1]]
    expected = mean(4, flat)
    for nothing, found in on_ranks(2, rank):
        assert nothing is None
        assert_equal(found, {name: 2 * one for name, one in expected.items()})


def test_several_passes_alone():
    def rank(comm):
        reduce = make(comm, parameters(), backward_passes_per_step=2)
        reduce(gradients(0), weight=1)
        return reduce({**gradients(1), "s": None}, weight=3)

    (found,) = on_ranks(1, rank)
    np.testing.assert_allclose(found["w"], 2 * (gradients(0)["w"] + 3 * gradients(1)["w"]) / 4)
    np.testing.assert_allclose(found["s"], 2 * gradients(0)["s"] / 4)


def test_gradients_in_the_buffers_are_not_copied(length):
    def rank(comm):
        reduce = make(comm, parameters())
        buffers = reduce.buffers
        memory = buffers["w"].base
        results = []
        for _ in range(2):
            for name, one in gradients(comm.rank).items():
                buffers[name][...] = one
            found = reduce(buffers)
            assert all(found[name] is buffers[name] for name in found)
            results.append({name: one.copy() for name, one in found.items()})
        return results, all(one.base is memory for one in buffers.values()), found["w"].flags.c_contiguous

    for results, one_buffer, contiguous in on_ranks(2, rank):
        assert one_buffer and contiguous
        for found in results:
            assert_equal(found, mean(2))


def test_an_unusual_step_leaves_nothing_behind_for_the_usual_ones_after_it(length):
    """Steps of one job: weights, gradients missing on a rank, a rank that fails; a usual one before and after each."""

    def rank(comm):
        reduce = make(comm, parameters())
        mine, found = gradients(comm.rank), []
        without = {**mine, "w": None}

        def usual():
            for name, one in mine.items():
                reduce.buffers[name][...] = one
            found.append({name: np.array(one) for name, one in reduce(reduce.buffers).items()})

        usual()
        reduce(mine, weight=1 + comm.rank)
        usual()
        reduce(without if comm.rank == 0 else reduce.buffers)
        usual()
        usual()  # what stays in two heads adds up
        with pytest.raises((AgreementError, InvalidArgumentError)):
            reduce({**mine, "w": np.zeros(1)} if comm.rank == 1 else reduce.buffers)
        usual()
        return found

    for of_rank in on_ranks(2, rank):
        assert len(of_rank) == 5
        for one in of_rank:
            assert_equal(one, mean(2))


@pytest.mark.parametrize("call", ["elsewhere", "buffers", "started"])
def test_the_containers_of_a_result_are_the_callers_to_change(length, call):
    """Clipping, weight decay: ``gradients["w"] = ...`` must not reach into the next step."""

    def rank(comm):
        reduce, found = make(comm, {"layer": [np.zeros(3, np.float32)], "b": np.zeros(2, np.float32)}), []
        for step in range(3):
            given = {"layer": [np.full(3, 10.0 * step + comm.rank)], "b": np.full(2, 10.0 * step + comm.rank)}
            if call == "buffers":
                reduce.buffers["layer"][0][...], reduce.buffers["b"][...] = given["layer"][0], given["b"]
                given = reduce.buffers
            result = reduce.start(given).wait() if call == "started" else reduce(given)
            found.append([result["layer"][0].tolist(), result["b"].tolist()])
            result["layer"][0] = np.full(3, 99.0)
            result["layer"].append(1)
            del result["b"]
        return found

    for found in on_ranks(2, rank):
        assert found == [[[10.0 * step + 0.5] * 3, [10.0 * step + 0.5] * 2] for step in range(3)]


@pytest.mark.parametrize("where", ["w", "layer"])
def test_an_array_that_takes_the_place_of_a_buffer_is_an_error_on_every_rank(length, where):
    """It would not be sent, and the ranks would differ from here on."""

    def rank(comm):
        reduce = make(comm, {"w": np.zeros(3), "layer": (np.zeros(2), [np.zeros(1)])})
        kept = reduce.buffers["w"], reduce.buffers["layer"][1][0]
        if comm.rank == 1:
            if where == "w":
                reduce.buffers["w"] = np.ones(3)
            else:
                reduce.buffers["layer"][1][0] = np.ones(1)
        error = _error(lambda: reduce(reduce.buffers))
        reduce.buffers["w"], reduce.buffers["layer"][1][0] = kept
        kept[0][...] = comm.rank
        return error, reduce(reduce.buffers)["w"].tolist()

    well, ill = on_ranks(2, rank)
    assert well[0].startswith("AgreementError: rank 1 failed") and "write into the one that is there" in well[0]
    assert ill[0].startswith("InvalidArgumentError: an array in reduce.buffers was replaced")
    assert well[1] == ill[1] == [0.5] * 3


@pytest.mark.parametrize("way", ["called", "in buffers", "started", "fp16"])
@pytest.mark.parametrize(
    ("mine", "op", "weight", "result"),
    [(3e38, "sum", None, np.inf), (1e-45, "average", None, 0.0), (1e-38, "average", 0.25, 0.0)],
)
def test_what_leaves_the_range_on_one_rank_ends_the_exchange_on_none(length, way, mine, op, weight, result):
    """NumPy may be told to raise, by ``np.seterr``; and which rank meets the overflow depends on who adds up what."""

    def rank(comm):
        compression = "fp16" if way == "fp16" else "none"
        reduce = make(comm, np.zeros(9, np.float32), threaded=True, op=op, compression=compression)
        given = np.full(9, mine if op == "sum" or comm.rank == 1 else 0.0, np.float32)
        if way == "in buffers":
            reduce.buffers[...] = given
            given = reduce.buffers
        with np.errstate(all="raise" if comm.rank == 1 else "ignore"):
            calls = reduce if way != "started" else lambda *a, **named: reduce.start(*a, **named).wait()
            found = calls(given, weight=weight).tolist()
            state = np.geterr()["over"]
        return found, reduce(np.ones(9)).tolist(), state

    ranks = on_ranks(2, rank)
    for found, after, _ in ranks:
        np.testing.assert_allclose(found, np.full(9, result), atol=1e-37)
        assert after == [2.0 if op == "sum" else 1.0] * 9
    assert [state for _, _, state in ranks] == ["ignore", "raise"]


def test_each_type_is_sent_once_and_short_ones_with_their_head():
    def rank(comm):
        reduce = make(comm, parameters())
        comm.sent.clear()
        reduce(gradients(comm.rank))
        once = list(comm.sent)
        mixed = make(comm, {"a": [np.zeros(8, "f4")] * 3, "b": [np.zeros(8, "f8")] * 3})
        comm.sent.clear()
        mixed(mixed.buffers)
        return once, list(comm.sent)

    for once, mixed in on_ranks(2, rank):
        assert once == [4 * (16 + 6 + 4 + 1)]
        assert mixed == [4 * 16, 3 * 8 * 4, 3 * 8 * 8]


def test_without_shared_memory_they_travel_by_mpi(monkeypatch):
    def rank(comm):
        reduce = make(comm, np.zeros(5000, np.float32))
        comm.sent.clear()
        assert (reduce(np.ones(5000)) == 1).all()
        return list(comm.sent)

    head, payload = 4 * 16, 4 * 5000
    assert on_ranks(2, rank, one_host=True) == [[head]] * 2
    assert on_ranks(2, rank, one_host=False) == [[head, payload]] * 2
    monkeypatch.setattr(shared_memory, "DIRECTORY", Path("/nowhere"))
    assert on_ranks(2, rank, one_host=True) == [[head, payload]] * 2


@pytest.mark.parametrize(
    ("given", "sent"),
    [("f2", "f4"), ("f4", "f4"), ("f8", "f8"), (">f8", "f8"), ("c8", "c8"), ("bfloat16", "f4"), ("float8_e5m2", "f4")],
)
def test_half_precisions_are_added_up_in_float32(given, sent):
    assert sent_as(_dtype(given), "x") == np.dtype(sent)


@pytest.mark.parametrize("given", ["int32", "bool", "uint8", "int4"])
def test_what_has_no_mean_is_refused(given):
    with pytest.raises(InvalidArgumentError, match=r"layers\.0 is of type .* has no mean"):
        sent_as(_dtype(given), "layers.0")


def _dtype(name):
    if name.startswith(("bfloat", "float8", "int4")):
        return np.dtype(getattr(pytest.importorskip("ml_dtypes"), name))
    return np.dtype(name)


@pytest.mark.parametrize(
    ("gpus", "usable"), [(["a 0:1", "a 0:2", "b 0:1"], True), (["a 0:1", "a 0:1"], False), (["a 0:1", None], False)]
)
def test_nccl_wants_a_gpu_for_each_rank(gpus, usable):
    assert buffers.has_own_gpus(gpus) is usable


def test_there_are_no_buffers_to_add_up_in():
    def rank(comm):
        return _error(lambda: make(comm, parameters(), backward_passes_per_step=2).buffers)

    assert all("adds them up" in error for error in on_ranks(2, rank))


# arithmetic that raises nothing, whatever the caller has told NumPy --------------------------------------------------


@pytest.mark.parametrize("numpy", ["as it is", "before 2.0"])
def test_nothing_is_raised_and_the_callers_state_stays(monkeypatch, numpy):
    if numpy == "before 2.0":  # its state is the thread's, whatever the context
        context = SimpleNamespace(run=lambda function, *arguments: function(*arguments))
        geterr = {"over": "warn"}
        monkeypatch.setattr(shared_memory.contextvars, "copy_context", lambda: context)
        monkeypatch.setattr(shared_memory.np, "geterr", lambda: geterr)
    calling = shared_memory.quiet()
    assert (getattr(calling, "__name__", "") == "run") == (numpy == "as it is")  # of a context
    monkeypatch.undo()
    with np.errstate(all="raise"):
        assert calling(np.multiply, np.float32(3e38), np.float32(10)) == np.inf
        assert np.geterr()["over"] == "raise"
        with pytest.raises(FloatingPointError):
            np.multiply(np.float32(3e38), np.float32(10))


def test_what_is_called_may_fail():
    calling = shared_memory.quiet()
    with pytest.raises(KeyError):
        calling({}.__getitem__, "x")
    assert calling(max, 1, 2) == 2


# half precision -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("weighted", [False, True])
def test_half_precision_is_off_by_two_roundings_at_most(size, weighted):
    values = [np.random.default_rng(rank).normal(size=1001).astype(np.float32) for rank in range(size)]
    weights = [float(1 + rank) for rank in range(size)] if weighted else None

    def rank(comm):
        weight = None if weights is None else weights[comm.rank]
        reduce = make(comm, values[0], compression="fp16")
        comm.sent.clear()
        return reduce(values[comm.rank], weight=weight).copy(), list(comm.sent)

    exact = np.average(np.array(values, np.float64), axis=0, weights=weights)
    largest = np.abs(values).max(axis=0) * (1 if weights is None else max(weights) * size / sum(weights))
    found = on_ranks(size, rank)
    for one, sent in found:
        assert np.array_equal(one, found[0][0]), "the ranks hold different bits"
        assert one.dtype == np.float32
        off = np.abs(one - exact)
        assert (off <= 2.0**-11 * (largest + np.abs(exact)) * 1.01 + 1e-7).all()
        assert off.max() > 1e-6, "nothing was rounded"
        assert sum(sent[1:]) <= 2 * 2 * (1001 + size)


def test_half_precision_adds_up_in_full():
    """In float16, 2048 + 1 is 2048: a sum in half precision would lose the small ones."""

    def rank(comm):
        return make(comm, np.zeros(2, np.float32), compression="fp16", op="sum")(
            np.array([2048, 1], np.float32) if comm.rank == 0 else np.array([1, 2048], np.float32)
        )

    for found in on_ranks(5, rank):
        assert found.tolist() == [2052, 8192]


def test_half_precision_keeps_small_gradients_of_many_ranks():
    """1e-7 is a number in float16, 1e-7 / 4 is not."""
    for found in on_ranks(4, lambda comm: make(comm, np.zeros(3), compression="fp16")(np.full(3, 1.2e-7))):
        np.testing.assert_allclose(found, 1.2e-7, rtol=0.01)


def test_half_precision_overflow_is_infinite_on_every_rank():
    for found in on_ranks(2, lambda comm: make(comm, np.zeros(2), compression="fp16")(np.array([1e6, 1.0]))):
        assert found.tolist() == [np.inf, 1.0]


def test_complex_gradients_keep_their_precision():
    given = np.array([1 + 1e-6j])
    for found in on_ranks(2, lambda comm: make(comm, given, compression="fp16")(given)):
        assert found.tolist() == given.tolist()


# without waiting ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threaded", [True, False])
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_started_gradients_arrive(length, threaded, compression):
    def rank(comm):
        reduce = make(comm, parameters(), threaded=threaded, compression=compression)
        given = gradients(comm.rank)
        pending = reduce.start(given)
        given["w"][...] = 99  # the caller's own again
        found = pending.wait()
        return {name: one.copy() for name, one in found.items()}, pending.wait() is found, pending.done()

    for found, again, done in on_ranks(2, rank):
        assert_equal(found, mean(2))
        assert again and done


def test_a_second_call_before_the_wait_is_refused():
    def rank(comm):
        reduce = make(comm, parameters())
        pending = reduce.start(gradients(comm.rank))
        error = _error(lambda: reduce(gradients(comm.rank)))
        pending.wait()
        return error, reduce(gradients(comm.rank))

    for error, found in on_ranks(2, rank):
        assert "still on their way" in error
        assert_equal(found, mean(2))


def test_an_interrupted_wait_may_wait_again():
    def interrupted():
        raise KeyboardInterrupt

    def rank(comm):
        reduce = make(comm, np.zeros(3), threaded=True)
        pending = reduce.start(np.full(3, float(comm.rank)))
        kept, pending._future = pending._future, SimpleNamespace(exception=interrupted)
        with pytest.raises(KeyboardInterrupt):
            pending.wait()
        pending._future = kept
        return pending.wait().tolist(), reduce(np.ones(3)).tolist()

    assert on_ranks(2, rank) == [([0.5] * 3, [1.0] * 3)] * 2


def test_started_passes_give_nothing_before_the_last():
    def rank(comm):
        reduce = make(comm, parameters(), backward_passes_per_step=2)
        return reduce.start(gradients(comm.rank)).wait(), reduce.start(gradients(comm.rank)).wait()

    for nothing, found in on_ranks(2, rank):
        assert nothing is None
        assert_equal(found, {name: 2 * one for name, one in mean(2).items()})


# mistakes -------------------------------------------------------------------------------------------------------------


def _error(action):
    try:
        action()
    except (AgreementError, InvalidArgumentError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


WRONG = {
    "shape": ({**gradients(0), "b": np.zeros(5)}, {}, "the gradient of b has the shape (5,), its parameter (4,)"),
    "name": ({"w": gradients(0)["w"]}, {}, "expected a container of b, s, w, got a dict of w"),
    "complex": ({**gradients(0), "b": np.zeros(4) + 1j}, {}, "the gradient of b is complex"),
    "text": ({**gradients(0), "b": "four"}, {}, "b is of type str"),
    "weight": (gradients(0), {"weight": -1}, "weight must be a finite number >= 0, got -1"),
    "nan": (gradients(0), {"weight": float("nan")}, "weight must be a finite number >= 0, got nan"),
    "word": (gradients(0), {"weight": "two"}, "weight must be a finite number >= 0, got 'two'"),
    "large": (gradients(0), {"weight": 1e39}, "weight must be 0 or in 1e-15 .. 1e+15, such as a number of samples"),
}


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("mistake", WRONG)
def test_a_mistake_on_one_rank_is_an_error_on_all_and_the_next_step_works(length, mistake, started):
    wrong, options, message = WRONG[mistake]

    def rank(comm):
        reduce = make(comm, parameters(), threaded=True)
        call = reduce if not started else lambda *given, **others: reduce.start(*given, **others).wait()
        if comm.rank == 1:
            error = _error(lambda: call(wrong, **options))
        else:
            error = _error(lambda: call(gradients(comm.rank), **({"weight": 1} if options else {})))
        return error, call(gradients(comm.rank))

    for number, (error, found) in enumerate(on_ranks(3, rank)):
        start = (
            "InvalidArgumentError: " if number == 1 else "AgreementError: rank 1 failed, and the others stop with it: "
        )
        assert error.startswith(start) and message in error
        assert_equal(found, mean(3))


def test_a_mistake_of_one_rank_alone_is_told():
    (error,) = on_ranks(1, lambda comm: _error(lambda: make(comm, parameters())(WRONG["shape"][0])))
    assert (
        error
        == f"InvalidArgumentError: {WRONG['shape'][2]}; give gradients of the parameters that distribute was given."
    )


def test_a_mistake_in_an_early_pass_is_told_in_the_exchange():
    def rank(comm):
        reduce = make(comm, parameters(), backward_passes_per_step=2)
        first = _error(lambda: reduce(WRONG["shape"][0] if comm.rank == 0 else gradients(1)))
        return first, _error(lambda: reduce(gradients(comm.rank)))

    for first, second in on_ranks(2, rank):
        assert first == "none" and "has the shape (5,)" in second


def test_a_weight_on_some_ranks_only(length):
    def rank(comm):
        return _error(lambda: make(comm, parameters())(gradients(0), weight=2 if comm.rank else None))

    assert (
        on_ranks(3, rank)
        == ["AgreementError: 2 of 3 ranks gave a weight for their gradients; give one on all or on none."] * 3
    )


def test_weights_that_are_all_zero(length):
    def rank(comm):
        return _error(lambda: make(comm, parameters())(gradients(0), weight=0))

    assert all("have the weight 0" in error for error in on_ranks(2, rank))


def test_a_weight_for_a_sum_or_for_some_passes_only():
    def rank(comm):
        several = make(comm, parameters(), backward_passes_per_step=2)
        several(gradients(0), weight=1)
        return _error(lambda: make(comm, parameters(), op="sum")(gradients(0), weight=1)), _error(
            lambda: several(gradients(0))
        )

    for summed, some in on_ranks(2, rank):
        assert "but op is 'sum'" in summed
        assert "in some passes" in some


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"w": np.zeros((2, 4), np.float32)}, "w float32 (2, 4)"),
        ({"w": np.zeros((2, 3), np.float64)}, "w float64 (2, 3)"),
        ({"v": np.zeros((2, 3), np.float32)}, "v float32 (2, 3)"),
        ({"w": np.zeros((2, 3), np.float32), "x": np.zeros(1)}, "x float64 (1,)"),
    ],
)
def test_different_models_are_one_error_on_every_rank(other, message):
    def rank(comm):
        return _error(lambda: make(comm, other if comm.rank == 1 else {"w": np.zeros((2, 3), np.float32)}))

    errors = on_ranks(3, rank)
    assert all("the ranks hold different models" in error for error in errors)
    assert message in errors[1]


def test_different_options_are_one_error_on_every_rank():
    def rank(comm):
        return _error(lambda: make(comm, parameters(), op="sum" if comm.rank else "average"))

    assert all("op='average'" in errors or "op='sum'" in errors for errors in on_ranks(2, rank))


def test_a_model_that_only_one_rank_cannot_read():
    def rank(comm):
        return _error(lambda: make(comm, {"w": np.zeros(2, "i4" if comm.rank else "f4")}))

    well, ill = on_ranks(2, rank)
    assert ill.startswith("InvalidArgumentError: w is of type int32, which has no mean")
    assert well.startswith("AgreementError: rank 1 failed") and "int32" in well


def test_no_array_at_all():
    assert "no array among the parameters" in on_ranks(1, lambda comm: _error(lambda: make(comm, {"a": None})))[0]
