"""Step 7: which samples each rank trains on, and with what weight.

In every epoch all ranks draw the same order of the whole data set. Global step s takes the next
batch_size * size samples of that order and rank k the k-th part of them, so that n ranks see in one step exactly
what one process with the n-fold batch would see.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from hvdkit.errors import InvalidArgumentError
from hvdkit.steps.epochs import steps_per_epoch
from hvdkit.steps.topology import Topology

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """One rank's part of a global step.

    Attributes:
        indices: int64 (m,), samples of the data set.
        weight: what each of these samples counts in the mean over the global batch: m_k * n / m with
            remainder="exact" (0 for a filler), else 1.
    """

    indices: Indices
    weight: float


@dataclass(frozen=True, slots=True)
class Shard:
    """A rank's share of a data set of ``n_samples``, epoch by epoch (step 7).

    Args:
        n_samples: samples in the whole data set.
        world: the job; rank and size are used.
        batch_size: samples per step on one rank.
        remainder: what becomes of the ragged end of the epoch. "drop" leaves it out (a different end each epoch);
            "pad" fills the last step with samples from the start of the order; "exact" uses every sample once, split
            as evenly as possible over the ranks, with weights w = m_k * n / m, so that the mean over the ranks of
            the mean of w * loss is the mean over the global batch. A rank without a sample in the last step gets
            one filler of weight 0 and still takes part in every collective.
        shuffle: draw a new order each epoch; else the order of the data set.
        seed: of the order; must be the same on every rank.
    Raises:
        InvalidArgumentError: as ``steps_per_epoch``, or a negative seed.
    """

    n_samples: int
    world: Topology
    batch_size: int
    remainder: str = "drop"
    shuffle: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        steps_per_epoch(self.n_samples, self.batch_size, self.world, self.remainder)
        if not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidArgumentError(f"seed must be an integer >= 0, got {self.seed!r}.")

    def __len__(self) -> int:
        return steps_per_epoch(self.n_samples, self.batch_size, self.world, self.remainder)

    def order(self, epoch: int) -> Indices:
        """The order of the whole data set in ``epoch``, int64 (n_samples,): the same on every rank.

        Raises:
            InvalidArgumentError: a negative epoch.
        """
        if not isinstance(epoch, int) or epoch < 0:
            raise InvalidArgumentError(f"epoch must be an integer >= 0, got {epoch!r}.")
        if not self.shuffle:
            return np.arange(self.n_samples, dtype=np.int64)
        generator = np.random.default_rng(np.random.SeedSequence([self.seed, epoch]))
        return generator.permutation(self.n_samples).astype(np.int64, copy=False)

    def batches(self, epoch: int) -> Iterator[Batch]:
        """This rank's batches of ``epoch``, ``len(self)`` of them."""
        order = self.order(epoch)
        global_batch = self.batch_size * self.world.size
        for step in range(len(self)):
            start = step * global_batch
            chunk = order[start : start + global_batch]
            if len(chunk) < global_batch and self.remainder == "exact":
                yield self._exact_part(chunk)
                continue
            if len(chunk) < global_batch:
                chunk = np.concatenate([chunk, np.resize(order, global_batch - len(chunk))])
            first = self.world.rank * self.batch_size
            yield Batch(chunk[first : first + self.batch_size], 1.0)

    def _exact_part(self, chunk: Indices) -> Batch:
        part = np.array_split(chunk, self.world.size)[self.world.rank]
        if len(part) == 0:
            return Batch(chunk[:1], 0.0)
        return Batch(part, len(part) * self.world.size / len(chunk))
