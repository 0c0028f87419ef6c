"""Step 1: who this process is among the processes of the job."""

from __future__ import annotations

from dataclasses import dataclass

from hvdkit.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Topology:
    """The place of one process in the job; immutable, the same meaning in every framework.

    Attributes:
        rank: this process among all, 0 .. size-1; rank 0 is the root.
        size: number of processes in the job (the world size).
        local_rank: this process among those on its host, 0 .. local_size-1.
        local_size: number of processes on this host.
        cross_rank: this host among the hosts that have a process with this local rank.
        cross_size: number of those hosts.
        launcher: what started the processes ("Open MPI", "srun", ...), "none" for a single process.
    Raises:
        InvalidArgumentError: a rank that is not below its size, or a negative number.
    """

    rank: int
    size: int
    local_rank: int = 0
    local_size: int = 1
    cross_rank: int = 0
    cross_size: int = 1
    launcher: str = "none"

    def __post_init__(self) -> None:
        pairs = (("rank", "size"), ("local_rank", "local_size"), ("cross_rank", "cross_size"))
        for position, count in pairs:
            index, total = getattr(self, position), getattr(self, count)
            for name, value in ((position, index), (count, total)):
                if not isinstance(value, int) or isinstance(value, bool):
                    raise InvalidArgumentError(f"{name} must be an integer, got {value!r}.")
            if not 0 <= index < total:
                raise InvalidArgumentError(
                    f"{position} must be in 0 .. {count}-1, got {position}={index}, {count}={total}."
                )

    @property
    def is_root(self) -> bool:
        """Whether this process is rank 0, the one that prints and writes checkpoints."""
        return self.rank == 0

    def __str__(self) -> str:
        return (
            f"rank {self.rank} of {self.size} (local {self.local_rank} of {self.local_size}, launcher {self.launcher})"
        )
