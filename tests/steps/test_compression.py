"""Gradients in fewer bytes: what ranks make of them, what is rounded, what is kept."""

import numpy as np
import pytest

from hvdkit.core import communicator, compression
from hvdkit.core.compression import BLOCK, Halves, Int8


def mean(packings, values, factor):
    """What every rank gets, by rank; the collectives by hand."""
    packed = [packing.pack(own).copy() for packing, own in zip(packings, values, strict=True)]
    parts = [packing.add_up(np.stack([rows[rank] for rows in packed]), factor) for rank, packing in enumerate(packings)]
    found = [np.full_like(own, 7) for own in values]
    for packing, own in zip(packings, found, strict=True):
        packing.unpack(np.stack(parts), own)
    return found


def drawn(length, ranks, dtype=np.float32):
    return [np.random.default_rng(rank).normal(size=length).astype(dtype) for rank in range(ranks)]


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("length", [1, 255, 257, 70_001, 200_000])
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_every_rank_gets_the_same_mean_within_a_step_of_the_largest(ranks, length, dtype):
    values = drawn(length, ranks, dtype)
    found = mean([Int8(length, rank, ranks) for rank in range(ranks)], values, 1 / ranks)
    assert all(np.array_equal(own, found[0]) for own in found)
    largest = np.abs(values).max()
    off = np.abs(found[0] - np.mean(values, axis=0))
    assert off.max() < 2 * largest / 126
    assert length == 1 or off.max() > 0


def test_what_is_rounded_away_comes_later():
    """Of 300 means of the same gradients the sum is off by no more than that of one."""
    values, ranks = drawn(3 * BLOCK + 5, 2), 2
    packings = [Int8(len(values[0]), rank, ranks) for rank in range(ranks)]
    whole = np.sum([mean(packings, values, 0.5)[0] for _ in range(300)], axis=0, dtype=np.float64)
    exact, kept = np.mean(values, axis=0), sum(packing.kept for packing in packings) / 2
    assert np.abs(whole - 300 * exact).max() < 4 * np.abs(values).max() / 126
    np.testing.assert_allclose(whole + kept, 300 * exact, atol=1e-3)


def test_the_rounding_has_no_bias():
    """Without what is kept: a value between two codes becomes each of them as often as it is near."""
    packing = Int8(4 * BLOCK, 0, 1)
    values = np.full(4 * BLOCK, 0.3 / 127, np.float32)
    values[::BLOCK] = 1
    found = []
    for _ in range(200):
        packing.kept[:] = 0
        found.append(mean([packing], [values], 1.0)[0][1])
    assert np.mean(found) * 127 == pytest.approx(0.3, abs=0.1)


def test_blocks_have_scales_of_their_own():
    values = np.ones(2 * BLOCK, np.float32)
    values[BLOCK:] = 1e-6
    (found,) = mean([Int8(2 * BLOCK, 0, 1)], [values], 1.0)
    np.testing.assert_allclose(found, values, rtol=0.03)


@pytest.mark.parametrize("kind", ["int8", "bf16", "fp16"])
def test_what_is_not_finite_stays_so_and_harms_no_other(kind):
    values = drawn(BLOCK + 9, 2)
    values[0][[3, 4, 5]] = np.inf, -np.inf, np.nan
    values[1][[4, 6]] = np.inf, -np.inf
    with np.errstate(invalid="ignore"):
        exact = np.mean(values, axis=0)
    packings = [compression.new_packing(kind, [("weight", len(exact))], rank, 2, saves=False) for rank in range(2)]
    with np.errstate(all="raise"):
        found = mean(packings, values, 0.5)
    for own in found:
        np.testing.assert_allclose(own, exact, atol=0.1)
    assert kind != "int8" or all(np.isfinite(packing.kept).all() for packing in packings)


def test_zeros_and_numbers_that_are_none_in_float32():
    values = np.zeros(BLOCK)
    values[0], values[1] = 1e-44, 1e300
    (found,) = mean([Int8(BLOCK, 0, 1)], [values], 1.0)
    assert found[1] == np.inf and not found[2:].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize(("bfloat16", "bits"), [(False, 11), (True, 8)])
def test_halves_are_off_by_two_roundings(bfloat16, bits, dtype):
    values = drawn(1001, 3, dtype)
    packings = [Halves(1001, 3, np.dtype(dtype), bfloat16=bfloat16) for _ in range(3)]
    found = mean(packings, values, 1 / 3)
    assert all(np.array_equal(own, found[0]) for own in found)
    off = np.abs(found[0] - np.mean(values, axis=0))
    assert 0 < off.max() < 2.0**-bits * 2 * np.abs(values).max()


def test_bfloat16_rounds_to_the_nearest_and_ties_to_even():
    packing = Halves(6, 1, np.dtype(np.float32), bfloat16=True)
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -3e38, 1e-38, 0], np.float32)
    values[5:].view(np.uint32)[:] = 0x7FFFFFFF  # NaN, which rounded up would be -0
    (found,) = mean([packing], [values], 1.0)
    assert found[:3].tolist() == [1.0, 1 + 2**-6, 1 + 2**-7]
    np.testing.assert_allclose(found, values, rtol=2**-8)


class Same(communicator.Alone):
    """As many ranks, each with what this one has."""

    def __init__(self, ranks):
        self._ranks, self.asked = ranks, []

    def size(self):
        return self._ranks

    def allreduce(self, values, name, op="sum"):
        self.asked.append(name)
        return np.array(values) * (self._ranks if op == "sum" else 1)


def test_a_training_goes_on_with_what_was_kept(monkeypatch):
    """Also where gradients lie in other vectors, and beside those of which nothing was kept."""
    monkeypatch.setattr(compression, "_KEPT", {})
    monkeypatch.setattr(compression, "_RESTORED", {})
    assert compression.to_save(Same(2)) == {}
    first = compression.new_packing("int8", [("a", 300), ("b", 20)], 1, 2, saves=True)
    alone = compression.new_packing("int8", [("c", 10)], 0, 1, saves=False)
    first.pack(drawn(320, 1)[0])
    alone.pack(np.ones(10, np.float32))
    kept, count = first.kept.copy(), first.drawn
    assert np.abs(kept).max() > 0 and count == 2
    saved = compression.to_save(Same(2))
    assert saved["names"].tolist() == ["a", "b"]
    np.testing.assert_array_equal(first.kept, kept)

    monkeypatch.setattr(compression, "_KEPT", {})
    compression.restore(saved)
    other = compression.new_packing("int8", [("new", 5), ("b", 20)], 0, 3, saves=True)
    assert not other.kept[:5].any() and other.drawn == count
    np.testing.assert_array_equal(other.kept[5:], kept[300:])
    rest = compression.new_packing("int8", [("a", 300)], 0, 3, saves=True)
    np.testing.assert_array_equal(rest.kept, kept[:300])
    compression.restore({})
    assert not rest.kept.any() and not other.kept.any()


def test_a_new_rank_that_keeps_nothing_yet_keeps_no_other_waiting(monkeypatch):
    """Each rank calls the same collectives, whatever it has: an elastic job saves before the new rank's first step."""

    class WithNewRank(Same):
        def allreduce(self, values, name, op="sum"):
            return np.minimum(super().allreduce(values, name, op), [0, 0])

    monkeypatch.setattr(compression, "_KEPT", {})
    new, old = WithNewRank(2), WithNewRank(2)
    assert compression.to_save(new) == {}
    packing = compression.new_packing("int8", [("a", 5)], 0, 2, saves=True)
    assert compression.to_save(old) == {} and packing.length == 5
    assert new.asked == old.asked
