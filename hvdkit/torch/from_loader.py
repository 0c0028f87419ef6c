"""What ``shard`` takes over from a ``DataLoader`` that it is given in the place of a data set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from hvdkit.errors import InvalidArgumentError

_OPTIONS = (
    "num_workers",
    "collate_fn",
    "pin_memory",
    "pin_memory_device",
    "timeout",
    "worker_init_fn",
    "multiprocessing_context",
    "generator",
    "prefetch_factor",
    "persistent_workers",
    "in_order",
)
_INSTEAD = "give its data set: shard(loader.dataset, world, batch_size)"


@dataclass(slots=True)
class Wanted:
    """The arguments of ``shard``; None: not given.

    Attributes:
        batch_size: samples per step on one rank.
        options: for the ``DataLoader`` that ``shard`` makes.
    """

    dataset: Any
    batch_size: Any
    remainder: Any
    shuffle: Any
    sampler: Any
    options: dict[str, Any]

    def __post_init__(self) -> None:
        if isinstance(self.dataset, DataLoader):
            self._take_over(self.dataset)
        self.remainder = "drop" if self.remainder is None else self.remainder
        self.shuffle = True if self.shuffle is None else self.shuffle

    def _take_over(self, loader: DataLoader[Any]) -> None:
        """Have what the loader does, but for what is given beside it.

        Raises:
            InvalidArgumentError: it makes its batches in another way, or something else is given.
        """
        name, batches = type(loader).__name__, loader.batch_sampler
        if hasattr(loader, "share"):
            raise InvalidArgumentError("the loader is from shard already; iterate it.")
        if type(loader).__iter__ is not DataLoader.__iter__ and name != "StatefulDataLoader":
            raise InvalidArgumentError(f"{name} has an __iter__ of its own, which shard would not call; {_INSTEAD}.")
        streamed = isinstance(loader.dataset, IterableDataset)
        if not streamed and not _is_plain(batches, BatchSampler):
            made = "makes no batches (batch_size=None)" if batches is None else f"has a {type(batches).__name__}"
            raise InvalidArgumentError(f"shard makes the batches, and the {name} {made}; {_INSTEAD}.")
        size = loader.batch_size if streamed else batches.batch_size  # type: ignore[union-attr]
        if self.batch_size not in (None, size):
            raise InvalidArgumentError(
                f"the {name} has batch_size={size}, and shard was given {self.batch_size}; both are samples per step "
                f"on one rank: leave out shard's, or {_INSTEAD}."
            )
        drops = loader.drop_last if streamed else batches.drop_last  # type: ignore[union-attr]
        self._take_remainder(name, drops, streamed)
        if not streamed and self.sampler is None and self.shuffle is None:
            self._take_order(batches.sampler)  # type: ignore[union-attr]
        self.dataset, self.batch_size = loader.dataset, size
        self.options = {option: getattr(loader, option) for option in _OPTIONS} | self.options

    def _take_remainder(self, name: str, drops: bool, streamed: bool) -> None:
        if drops and self.remainder not in (None, "drop"):
            raise InvalidArgumentError(
                f"the {name} has drop_last=True, and shard was given remainder={self.remainder!r}; leave one out."
            )
        if self.remainder is None and not drops and streamed:
            raise InvalidArgumentError(
                f"the {name} keeps the last short batch of a stream (drop_last=False), which not every rank has; say "
                "remainder='drop', which leaves it out, or 'exact', whose batches have the samples' weights w."
            )
        self.remainder = self.remainder or ("drop" if drops else "pad")

    def _take_order(self, sampler: Any) -> None:
        random = _is_plain(sampler, RandomSampler) and not sampler.replacement
        if random and len(sampler) == len(sampler.data_source):
            self.shuffle = True
        elif _is_plain(sampler, SequentialSampler):
            self.shuffle = False
        else:
            self.sampler = sampler


def _is_plain(sampler: Any, kind: type) -> bool:
    """Whether it is PyTorch's own, or torchdata's with a state, and no subclass of the user's."""
    return isinstance(sampler, kind) and type(sampler).__module__.split(".")[0] in ("torch", "torchdata")
