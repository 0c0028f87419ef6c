"""How many structured changes check_agreement's digests miss: pairs of tensors that differ, and their digests do not.

    python benchmarks/missed_changes.py                          (10 million pairs)

A tensor has two chunks of eight words, with salts from anywhere in a chunk; its values are random, normal, all
equal, or equal but for their signs.
Ends with status 1 when a pair is missed.
"""

import argparse
import sys

import numpy as np

from hvdkit.steps.agreement import CHUNK, join_chunks, salted, salts

BATCH, CHUNKS, WORDS = 10_000, 2, 8
SIZE = CHUNKS * WORDS
TOP = np.uint64(1 << 63)  # the sign of a float64
SIGNS = np.array([1 << 63, 1 << 31, 1 << 63 | 1 << 31], dtype=np.uint64)  # of two float32: one, the other, both


def tensors(random):
    """Bits, uint64 (BATCH, SIZE)."""
    kinds = [
        random.integers(0, 2**64, (BATCH, SIZE), dtype=np.uint64),
        random.normal(size=(BATCH, SIZE)).view(np.uint64),
        random.normal(size=(BATCH, 2 * SIZE)).astype(np.float32).view(np.uint64),
        random.normal(size=(BATCH, 1)).view(np.uint64).repeat(SIZE, axis=1),
        (random.normal(size=(BATCH, 1)) * random.choice([-1, 1], (BATCH, SIZE))).view(np.uint64),
    ]
    return np.choose(random.integers(0, len(kinds), (BATCH, 1)), kinds)


def places(random, count):
    """Which ``count`` words of each tensor, bool (BATCH, SIZE)."""
    return random.permuted(np.arange(SIZE) < np.broadcast_to(count, (BATCH, SIZE)), axis=1)


def bits(random):
    return np.uint64(1) << random.integers(0, 64, (BATCH, 1), dtype=np.uint64)


def exchange(random, before):
    where = places(random, 2)
    first, second = np.nonzero(where)[1].reshape(BATCH, 2).T
    rows = np.arange(BATCH)
    before[rows, second] = before[rows, first] ^ bits(random)[:, 0]
    after = before.copy()
    after[rows, first], after[rows, second] = before[rows, second], before[rows, first]
    return after


def rotate(random, before):
    return np.take_along_axis(before, (np.arange(SIZE) + random.integers(1, SIZE, (BATCH, 1))) % SIZE, axis=1)


def any_number(random):
    return random.integers(1, SIZE + 1, (BATCH, 1))


CHANGES = {
    "a bit": lambda random, before: before ^ places(random, 1) * bits(random),
    "a bit at two places": lambda random, before: before ^ places(random, 2) * bits(random),
    "a bit at any places": lambda random, before: before ^ places(random, any_number(random)) * bits(random),
    "signs of float64": lambda random, before: before ^ places(random, any_number(random)) * TOP,
    "signs of float32": lambda random, before: (
        before ^ places(random, any_number(random)) * random.choice(SIGNS, (BATCH, 1))
    ),
    "two words exchanged": exchange,
    "rotated": rotate,
    "rotated between tensors": rotate,
    "all words": lambda random, before: before ^ bits(random),
}


def missed(random, name):
    """Of BATCH pairs: how many differ, and how many of these the digests do not tell."""
    before = tensors(random)
    after = CHANGES[name](random, before)
    own_salts = random.choice(salts(CHUNK), WORDS, replace=False)
    sums = [
        salted(words.view(np.int64).reshape(BATCH, CHUNKS, WORDS), own_salts).sum(axis=2) for words in (before, after)
    ]
    # between tensors each chunk is a tensor of its own
    of_each = [one if "tensors" in name else join_chunks(one.T)[:, None] for one in sums]
    equal, differ = (of_each[0] == of_each[1]).all(axis=1), (before != after).any(axis=1)
    return np.array([differ.sum(), (differ & equal).sum()])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=10_000_000, help="at least so many (default 10 million)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    random = np.random.default_rng(args.seed)
    totals = {name: np.zeros(2, dtype=np.int64) for name in CHANGES}
    while sum(pairs for pairs, _ in totals.values()) < args.pairs:
        for name, total in totals.items():
            total += missed(random, name)
    for name, (pairs, lost) in totals.items():
        print(f"{name:24} {pairs:10} pairs, {lost} missed")
    pairs, lost = sum(totals.values())
    print(f"{'all':24} {pairs:10} pairs, {lost} missed")
    sys.exit(int(lost > 0))


if __name__ == "__main__":
    main()
