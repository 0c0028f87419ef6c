"""What carries the collectives out: Horovod, MPI, this tool's ring over MPI messages, or torch.distributed.

An engine's library is imported on the rank that uses it, and nowhere else.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hvdkit.core import communicator
from hvdkit.core.communicator import OverHorovod, OverMpi, PendingCollective, shares
from hvdkit.core.compression import AT_ONCE, new_packing
from hvdkit.errors import InvalidArgumentError, LauncherError, MissingFrameworkError
from hvdkit.measure.emulate import check, ring
from hvdkit.measure.emulate.check import ALL_TO_ALL, ALLREDUCE, BROADCAST, REDUCE_SCATTER, ROOT, storage
from hvdkit.measure.emulate.plan import ReplayPlan
from hvdkit.measure.emulate.results import HOROVOD, MPI, RING, EmulateAsked
from hvdkit.steps import bootstrap, device, launchers, starting
from hvdkit.steps.gradients import GradientOptions
from hvdkit.steps.torch_tensors import sends_bfloat16

_TORCH_TYPES = ("float32", "float64", "float16", "bfloat16", "int8", "uint8", "int32", "int64")
TYPES = {
    HOROVOD: ("float32", "float64", "float16", "int32", "int64"),
    MPI: ("float32", "float64", "int8", "uint8", "int16", "uint16", "int32", "int64"),
    RING: ("float32", "float64", "float16", "int8", "uint8", "int16", "uint16", "int32", "int64"),
    "torch": _TORCH_TYPES,
    "gloo": _TORCH_TYPES,
    "nccl": _TORCH_TYPES,
}
"""Types that an engine can add: horovod/torch/mpi_ops_v2.cc, MPI 4.1 section 6.9.2, NumPy, Gloo."""
_TORCH = "run \"pip install 'hvdkit[torch]'\""
_MPI = "run \"pip install 'hvdkit[mpi]'\", with the MPI that starts the ranks loaded"
_MISSING = {HOROVOD: "run 'hvdkit install' where PyTorch is, or use --engine mpi", MPI: _MPI, RING: _MPI}
_WAIT_S = 120.0
_HALVES = {"fp16": "float16", "bf16": "bfloat16"}
_COLLECTIVES = {
    ALLREDUCE: communicator.ALLREDUCE,
    REDUCE_SCATTER: communicator.REDUCESCATTER,
    BROADCAST: communicator.BROADCAST,
    ALL_TO_ALL: communicator.ALLTOALL,
}


@dataclass(frozen=True, slots=True)
class CollectiveOperation:
    """One collective of the plan on this rank: loaded, started and finished once in every trial.

    Both what is given and what is got have one dimension and ``check.storage(dtype)``, wherever the engine keeps them.

    Attributes:
        load: takes what this rank gives; outside of the time that is measured.
        finish: returns what this rank got, when it has it.
        start: gives it to the engine, and may return before anything is done; its value is what ``finish`` takes.
        as_array: what ``finish`` returned, as an array; outside of the time that is measured.
    """

    load: Callable[[NDArray[Any]], object]
    finish: Callable[[Any], Any]
    start: Callable[[], Any] = lambda: None
    as_array: Callable[[Any], NDArray[Any]] = np.asarray


@dataclass(slots=True)
class Engine:
    """A connection to all ranks.

    Attributes:
        rank, size: of this process in the job.
        operation: makes what carries out the collective at a place in the plan, of so many elements of a type; asked
            for in the same order on every rank.
        barrier: returns when all ranks have called it.
        close: leaves the others; nothing can be done afterwards.
        compressed: makes what carries out an allreduce by a word of ``distribute(compression=)`` other than "none"; as
            ``operation``, with that word in the place of the collective.
        overlaps: all operations of a step are started before the first one is finished.
        notes: what a reader of the numbers should know, full sentences.
    """

    rank: int
    size: int
    operation: Callable[[int, str, int, str], CollectiveOperation]
    barrier: Callable[[], object]
    close: Callable[[], object]
    compressed: Callable[[int, str, int, str], CollectiveOperation]
    overlaps: bool = False
    notes: tuple[str, ...] = ()


def refuse(asked: EmulateAsked, plan: ReplayPlan) -> None:
    """Refuse, before any rank is started, what the engine cannot do whatever the ranks are (InvalidArgumentError)."""
    if asked.engine == RING and asked.collective == ALL_TO_ALL:
        raise InvalidArgumentError(
            "An all-to-all over a ring would send every block through all the ranks between; use --engine mpi, or "
            "another --collective."
        )
    if asked.compression != "none" and (asked.engine == RING or asked.collective != ALLREDUCE):
        raise InvalidArgumentError(
            f"--compression {asked.compression} replays allreduces over other engines than the ring, got --engine "
            f"{asked.engine} --collective {asked.collective}; use --engine mpi, or leave it out."
        )
    known = TYPES[asked.engine]
    for one in plan.collectives:
        if one.dtype not in known:
            others = [name for name, types in TYPES.items() if one.dtype in types]
            raise InvalidArgumentError(
                f"{one.name!r} is {one.dtype}, which --engine {asked.engine} does not take; use --engine "
                f"{' or '.join(others)}, or one of {', '.join(known)}."
            )
        if asked.check and not check.largest(asked.collective, one.dtype, asked.ranks):
            raise InvalidArgumentError(
                f"The sum over {asked.ranks} ranks cannot be checked in {one.dtype}, which holds whole numbers up to "
                f"{check.EXACT[one.dtype]} only; use another type, or --no-check."
            )
        if asked.compression != "none" and one.dtype not in ("float32", "float64"):
            raise InvalidArgumentError(
                f"{one.name!r} is {one.dtype}, and --compression {asked.compression} is for float32 and float64; leave "
                "it out, or use such sizes."
            )


def connect(asked: EmulateAsked, folder: Path) -> Engine:
    """Connect this rank to the others; a collective. Ranks of torch.distributed meet in ``folder``, which all share.

    Raises:
        MissingFrameworkError: the engine's package is not installed here.
        LauncherError: the engine sees other ranks than were started.
        InvalidArgumentError: NCCL is asked for, and PyTorch sees no GPU for this rank.
    """
    name = asked.engine
    try:
        if name == HOROVOD:
            found = over_horovod(asked)
        else:
            found = over_mpi(asked) if name in (MPI, RING) else over_torch(asked, folder)
    except MissingFrameworkError:
        raise
    except ImportError as error:
        raise MissingFrameworkError(
            f"--engine {name} cannot be used here ({error}); {_MISSING.get(name, _TORCH)}."
        ) from error
    if found.size != asked.ranks:
        raise LauncherError(
            f"{asked.ranks} ranks were started, and --engine {name} sees {found.size} (process {os.getpid()}): "
            "the launcher belongs to another MPI; run 'hvdkit doctor', or choose another --launcher."
        )
    return found


def _options(collective: str, elements: int, size: int) -> dict[str, Any]:
    """What ``Communicator.start`` is told of a collective besides its name."""
    options: dict[str, dict[str, Any]] = {BROADCAST: {"root": ROOT}, ALL_TO_ALL: {"counts": shares(elements, size)}}
    return options.get(collective, {})


def packed(
    start: Callable[[str, NDArray[Any], str], PendingCollective],
    name: str,
    compression: str,
    elements: int,
    dtype: str,
    rank: int,
    ranks: int,
) -> CollectiveOperation:
    """An allreduce of packed numbers (``core.compression``), of which some are packed while those before travel.

    ``start`` begins an alltoall or an allgather of rows, by a name; ``name`` is that of these numbers.
    """
    values = np.empty(elements, dtype)
    parts = [
        (part, f"{name}.{at}", new_packing(compression, [(name, len(part))], rank, ranks, dtype=dtype, saves=False))
        for at, part in enumerate(np.split(values, range(AT_ONCE, elements, AT_ONCE)))
    ]

    def finish(received: list[PendingCollective]) -> NDArray[Any]:
        means = [
            start(communicator.ALLGATHER, packing.add_up(rows.wait(), 1.0)[None], f"{called}.mean")
            for rows, (_, called, packing) in zip(received, parts, strict=True)
        ]
        for mean, (part, _, packing) in zip(means, parts, strict=True):
            packing.unpack(mean.wait(), part)
        return values

    return CollectiveOperation(
        load=lambda given: np.copyto(values, given),
        start=lambda: [
            start(communicator.ALLTOALL, packing.pack(part), f"{called}.parts") for part, called, packing in parts
        ],
        finish=finish,
    )


def over_horovod(asked: EmulateAsked) -> Engine:
    """Horovod on PyTorch's tensors in main memory, started as a training would.

    With fusion all tensors of a step are given before the first is waited for. Each tensor has one name, by which
    Horovod knows it again in the next trial.
    """
    hvd: Any = importlib.import_module("horovod.torch")
    ranks = OverHorovod(hvd, importlib.import_module("torch").from_numpy)
    world = starting.start(hvd, os.environ)

    def operation(index: int, collective: str, elements: int, dtype: str) -> CollectiveOperation:
        name, given = f"hvdkit.emulate.{index}", np.empty(elements, storage(dtype))
        options = _options(collective, elements, world.size)

        def finish(request: communicator.PendingCollective) -> Any:
            got = request.wait()
            return ranks.run(communicator.ALLGATHER, got, f"{name}.gather") if collective == REDUCE_SCATTER else got

        return CollectiveOperation(
            load=lambda values: np.copyto(given, values),
            start=lambda: ranks.start(_COLLECTIVES[collective], given, name, **options),
            finish=finish,
        )

    def compressed(index: int, compression: str, elements: int, dtype: str) -> CollectiveOperation:
        name, size = f"hvdkit.emulate.{compression}.{index}", world.size
        if compression == "int8":
            return packed(ranks.start, name, compression, elements, dtype, world.rank, size)
        GradientOptions(compression=compression).require_possible(
            size, all_ranks=True, over_mpi=False, adds_bfloat16=sends_bfloat16("cpu", size)
        )
        torch: Any = importlib.import_module("torch")
        wide, half = torch.from_numpy(np.empty(elements, dtype)), getattr(torch, _HALVES[compression])
        return CollectiveOperation(
            load=lambda values: np.copyto(wide.numpy(), values),
            start=lambda: hvd.allreduce_async_(wide.to(half), name=name, op=hvd.Sum),
            finish=lambda handle: wide.copy_(hvd.synchronize(handle)).numpy(),
        )

    return Engine(world.rank, world.size, operation, hvd.barrier, hvd.shutdown, compressed, overlaps=asked.fusion)


def over_mpi(asked: EmulateAsked) -> Engine:
    """All ranks of MPI_COMM_WORLD, without MPI's locks: one thread of this process uses it.

    The collectives are MPI's own, or those of ``ring``, whose messages are bytes, whatever the type of the elements.
    """
    importlib.import_module("mpi4py").rc.thread_level = "single"
    library: Any = importlib.import_module("mpi4py.MPI")
    comm = library.COMM_WORLD
    ranks = OverMpi(comm, library)
    rank, size = ranks.rank(), ranks.size()
    transport = ring.RingTransport(
        rank,
        size,
        send=lambda part, to: comm.Isend(part.view(np.uint8), to).Wait,
        receive=lambda part, source: comm.Irecv(part.view(np.uint8), source).Wait,
    )

    def operation(index: int, collective: str, elements: int, dtype: str) -> CollectiveOperation:  # noqa: ARG001
        given = np.empty(elements, storage(dtype))
        if asked.engine == RING:  # an allreduce by a ring is a reduce-scatter and an all-gather
            by_ring = ring.broadcast if collective == BROADCAST else ring.allreduce
            runs: list[Callable[[], object]] = [lambda: by_ring(transport, given)]
            got = given
        else:
            calls = [ranks.repeated(_COLLECTIVES[collective], given, **_options(collective, elements, size))]
            if collective == REDUCE_SCATTER:
                parts = shares(elements, size)
                calls.append(ranks.repeated(communicator.ALLGATHER, calls[0].got, counts=parts))
            runs, got = [call.run for call in calls], calls[-1].got

        def finish(_: Any) -> NDArray[Any]:
            for run in runs:
                run()
            return got

        return CollectiveOperation(load=lambda values: np.copyto(given, values), finish=finish)

    def compressed(index: int, compression: str, elements: int, dtype: str) -> CollectiveOperation:
        # MPI adds up none of these types
        return packed(ranks.start, str(index), compression, elements, dtype, rank, size)

    return Engine(rank, size, operation, comm.Barrier, library.Finalize, compressed)


def over_torch(asked: EmulateAsked, folder: Path) -> Engine:
    """torch.distributed: Gloo on tensors in main memory, NCCL on GPUs. The ranks meet at a file."""
    torch: Any = importlib.import_module("torch")
    distributed: Any = importlib.import_module("torch.distributed")
    launched, size = launchers.detect(os.environ), asked.ranks
    if launched is None and size > 1:
        raise LauncherError(f"No launcher known here started this rank; known are {', '.join(launchers.KNOWN)}.")
    rank = launched.rank if launched is not None else 0
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    backend = asked.engine if asked.engine != "torch" else "nccl" if visible else "gloo"
    place = "cuda" if backend == "nccl" else "cpu"
    if backend == "nccl":
        if not visible:
            raise InvalidArgumentError("NCCL needs a GPU for each rank, and PyTorch sees none; use --engine gloo.")
        local = launched.local_rank if launched is not None and launched.local_rank is not None else rank
        torch.cuda.set_device(device.device_index(local, visible))
    wait: Callable[[], object] = torch.cuda.synchronize if backend == "nccl" else lambda: None
    patience = timedelta(seconds=_WAIT_S)
    store = distributed.FileStore(str(folder / "store"), size)
    store.set_timeout(patience)
    if backend == "gloo" and "GLOO_SOCKET_IFNAME" not in os.environ:
        # the one on which this rank reaches the others: Gloo's own guess is that of the host's name
        store.set(f"host{rank}", socket.gethostname())
        names = [store.get(f"host{other}").decode() for other in range(size)]
        others = [name for name in names if name != names[rank]]
        # one of them tells it; Gloo needs no other name, and not every host need know all
        os.environ["GLOO_SOCKET_IFNAME"] = bootstrap.interface_of(bootstrap.own_address(*others[:1]))
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=patience)

    def operation(index: int, collective: str, elements: int, dtype: str) -> CollectiveOperation:  # noqa: ARG001
        bfloat16 = dtype == "bfloat16"  # which NumPy does not know

        def as_tensor(array: NDArray[Any]) -> Any:
            tensor = torch.from_numpy(array.view(np.int16) if bfloat16 else array)
            return (tensor.view(torch.bfloat16) if bfloat16 else tensor).to(place)

        parts = shares(elements, size)
        received = [parts[rank]] * size
        # a reduce-scatter has equal parts, the last one filled up with 0
        padded = -(-elements // size) * size if collective == REDUCE_SCATTER else elements
        given = as_tensor(np.zeros(padded, storage(dtype)))
        own = given[: padded // size].clone()
        got = as_tensor(np.zeros(sum(received) if collective == ALL_TO_ALL else padded, storage(dtype)))

        def load(values: NDArray[Any]) -> None:
            given[:elements] = as_tensor(values)
            wait()

        def finish(_: Any) -> Any:
            if collective == ALLREDUCE:
                distributed.all_reduce(given)
            elif collective == BROADCAST:
                distributed.broadcast(given, ROOT)
            elif collective == REDUCE_SCATTER:
                distributed.reduce_scatter_tensor(own, given)
                distributed.all_gather_into_tensor(got, own)
            else:
                distributed.all_to_all_single(got, given, received, parts)
            wait()
            return given if collective in (ALLREDUCE, BROADCAST) else got

        def as_array(output: Any) -> NDArray[Any]:
            output = output.cpu()
            array = np.asarray((output.view(torch.int16) if bfloat16 else output).numpy())
            array = array.view(np.uint16) if bfloat16 else array
            return array if collective == ALL_TO_ALL else array[:elements]

        return CollectiveOperation(load, finish, as_array=as_array)

    def start(collective: str, rows: NDArray[Any], name: str) -> PendingCollective:  # noqa: ARG001
        given = torch.from_numpy(rows).to(place)
        got = torch.empty((size, *given.shape[1:]), dtype=given.dtype, device=place)
        gathers = collective == communicator.ALLGATHER
        (distributed.all_gather_into_tensor if gathers else distributed.all_to_all_single)(got, given)
        return PendingCollective(lambda: True, lambda: got.cpu().numpy())

    def compressed(index: int, compression: str, elements: int, dtype: str) -> CollectiveOperation:
        if compression == "int8":
            return packed(start, str(index), compression, elements, dtype, rank, size)
        wide = torch.from_numpy(np.empty(elements, dtype)).to(place)

        def finish(_: Any) -> Any:
            sent = wide.to(getattr(torch, _HALVES[compression]))
            distributed.all_reduce(sent)
            wide.copy_(sent)
            wait()
            return wide

        return CollectiveOperation(
            lambda values: wide.copy_(torch.from_numpy(values)), finish, as_array=lambda output: output.cpu().numpy()
        )

    notes = (f"torch.distributed used {backend}.",)
    return Engine(
        rank, size, operation, distributed.barrier, distributed.destroy_process_group, compressed, notes=notes
    )
