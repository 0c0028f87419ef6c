"""What travels in one allreduce of gradients: which of them, in which order; and the control word beside them.

The control word is what a rank says beside its gradients, in a few numbers:

==========================  ====================================================================
number                      this rank writes
==========================  ====================================================================
0 .. ``FLAGS - 1``          its ``Flags``, in their order, 0 where it has nothing to say
``FLAGS`` .. ``FLAGS + n``  of each of n gradients 1 where it has one, 0 where it is None
==========================  ====================================================================

The sum over the ranks tells every rank how many say what, at the cost of no collective of its own. The first number
is above 0 where any of the others is unusual, so that a step in which all is as ever looks at one number.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


def in_buckets(kinds: Sequence[Hashable], sizes: Sequence[int], limit: float) -> list[list[int]]:
    """Gradients in buckets: each is closed as soon as it has so many bytes, and can leave before the others.

    Args:
        kinds: of each gradient, in the order in which they become ready; a bucket is of one kind.
        sizes: of each, in bytes.
        limit: bytes from which on a bucket is full, > 0.
    Returns:
        The positions in each bucket; full ones first, in the order in which they become full.
    """
    growing: dict[Hashable, list[int]] = {}
    filled: dict[Hashable, int] = {}
    full: list[list[int]] = []
    for position, (kind, size) in enumerate(zip(kinds, sizes, strict=True)):
        growing.setdefault(kind, []).append(position)
        filled[kind] = filled.get(kind, 0) + size
        if filled[kind] >= limit:
            full.append(growing.pop(kind))
            del filled[kind]
    return [*full, *growing.values()]


def by_arrival(arrived: Mapping[Any, int], gradients: Sequence[Hashable]) -> list[int]:
    """For each gradient, in the order of the model, when it is expected: those that arrived, then last layers first."""
    last = len(arrived) + len(gradients)
    return [arrived.get(gradient, last - place) for place, gradient in enumerate(gradients)]


def sorted_alike(arrivals: Sequence[Any]) -> list[int]:
    """The order of all ranks' gradients, from the ``by_arrival`` of each rank: that of the first."""
    return [int(place) for place in np.argsort(np.asarray(arrivals[0]), kind="stable")]


class Flags(NamedTuple):
    """What a rank says, 0 or 1 each; once the words of all ranks are added up, how many ranks say it.

    Attributes:
        unusual: a flag below is set, or a gradient is None. ``ControlWord.write`` sets it.
        failed: an error ended its computation of gradients, and it sends none.
        changed: it needs another layout of the gradients.
        late: no computation of gradients has sent them: it is about to step without.
        has_fingerprint: it has fingerprints of its parameters to compare; see ``hvdkit.steps.divergence``.
        weighted: its gradients are weighted.
        weight: by so much: a sum, not a number of ranks.
    """

    unusual: float = 0.0
    failed: float = 0.0
    changed: float = 0.0
    late: float = 0.0
    has_fingerprint: float = 0.0
    weighted: float = 0.0
    weight: float = 0.0


FLAGS = len(Flags())
"""Numbers of a control word before those of its gradients."""
NO_FLAGS = Flags()


class ControlWord:
    """Writes the word beside some gradients; ``usual`` is that of a rank that has all and nothing to say, float32."""

    def __init__(self, gradients: int) -> None:
        self.usual: npt.NDArray[np.float32] = np.zeros(FLAGS + gradients, dtype=np.float32)
        self.usual[FLAGS:] = 1

    def __len__(self) -> int:
        return len(self.usual)

    def write(self, word: Any, flags: Flags = NO_FLAGS, absent: Collection[int] = (), usual: Any = None) -> None:
        """Write this rank's word into an array or tensor, (len(self),); ``absent``: which gradients are None here.

        ``usual`` is ``self.usual`` in the kind of ``word``, where that takes no NumPy array.
        """
        word[:] = self.usual if usual is None else usual
        if absent or any(flags):
            word[0] = 1
            for place, flag in enumerate(flags[1:], start=1):
                if flag:
                    word[place] = flag
            for place in absent:
                word[FLAGS + place] = 0


def read_flags(word: Sequence[float], ranks: float = 1.0) -> Flags:
    """What the ranks say, from the sum of their words; where the mean was taken instead, ``ranks`` is their number."""
    return Flags(*(number * ranks for number in word[:FLAGS]))


def is_held(word: Sequence[float], gradient: int) -> bool:
    """Whether any rank has this gradient, from the sum or the mean of their words."""
    return word[FLAGS + gradient] > 0


def joined(several: Sequence[Flags]) -> Flags:
    """The most that is said in any of several words, one or more, such as those of several buckets."""
    return Flags(*map(max, zip(*several, strict=True)))


def said_by_some(flag: float, ranks: int) -> bool:
    """Whether a flag was set on some ranks and not on all; what travels in half precision is rounded."""
    return 0 < flag < ranks - 0.5
