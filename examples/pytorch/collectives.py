"""The collective operations on small tensors, and a matrix product on N processes, cut in two ways and checked."""

import statistics
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

import hvdkit.torch as hk
from hvdkit import flags
from hvdkit.errors import AgreementError

BYTES = 4  # of a float32


def broadcast(mine, everyone, _):
    """Rank 0's tensor, on every rank."""
    received = mine.clone()
    dist.broadcast(received, src=0)
    return received, everyone[0]


def scatter(mine, everyone, rank):
    """Rank r gets piece r of rank 0's tensor."""
    received = torch.empty(1)
    dist.scatter(received, list(mine.split(1)) if rank == 0 else None, src=0)
    return received, everyone[0][rank : rank + 1]


def gather(mine, everyone, rank):
    """Rank 0 gets all tensors."""
    received = [torch.empty_like(mine) for _ in everyone] if rank == 0 else None
    dist.gather(mine, received, dst=0)
    return (torch.cat(received), torch.cat(everyone)) if rank == 0 else (torch.empty(0), torch.empty(0))


def all_gather(mine, everyone, _):
    """Every rank gets all tensors."""
    received = [torch.empty_like(mine) for _ in everyone]
    dist.all_gather(received, mine)
    return torch.cat(received), torch.cat(everyone)


def reduce(mine, everyone, rank):
    """Rank 0 gets the sum."""
    received = mine.clone()
    dist.reduce(received, dst=0)
    return (received, sum(everyone)) if rank == 0 else (torch.empty(0), torch.empty(0))


def all_reduce(mine, everyone, _):
    """Every rank gets the sum."""
    received = mine.clone()
    dist.all_reduce(received)
    return received, sum(everyone)


def reduce_scatter(mine, everyone, rank):
    """Rank r gets piece r of the sum."""
    received = torch.empty(1)
    dist.reduce_scatter(received, list(mine.split(1)))
    return received, sum(everyone)[rank : rank + 1]


def all_to_all(mine, everyone, rank):
    """Rank r gets piece r of every tensor: rows become columns."""
    received = [torch.empty(1) for _ in everyone]
    dist.all_to_all(received, list(mine.split(1)))
    return torch.cat(received), torch.stack(everyone)[:, rank]


OPERATIONS = (broadcast, scatter, gather, all_gather, reduce, all_reduce, reduce_scatter, all_to_all)


def show_operations(world):
    """Each operation on the tensors 10 * rank + (0, 1, ...), one element for each rank, with what every rank gets."""
    everyone = [10.0 * rank + torch.arange(world.size) for rank in range(world.size)]
    mine = everyone[world.rank]
    say(world, "before", "", mine)
    for operation in OPERATIONS:
        received, expected = operation(mine, everyone, world.rank)
        require(torch.equal(received, expected), f"{operation.__name__} did not give what it should")
        say(world, operation.__name__, operation.__doc__, received)


def say(world, name, meaning, tensor):
    """On rank 0, what every rank holds."""
    lines = [None] * world.size if world.is_root else None
    dist.gather_object(" ".join(f"{value:g}" for value in tensor.tolist()) or "-", lines)
    if world.is_root:
        held = "   ".join(f"rank {rank}: {line}" for rank, line in enumerate(lines))
        print(f"{name:<15} {held}" + (f"   ({meaning[0].lower()}{meaning[1:-1]})" if meaning else ""), flush=True)


def require(right, problem):
    """End every rank when one of them is wrong; a collective."""
    everywhere = torch.tensor(int(right))
    dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
    if not everywhere.item():
        raise AgreementError(f"{problem}; this PyTorch or its network is not to be trusted.")


class Phases:
    """Seconds of the named phases of a computation, from a barrier to a barrier."""

    def __init__(self):
        self.seconds = {}

    @contextmanager
    def __call__(self, name):
        dist.barrier()
        start = time.perf_counter()
        yield
        dist.barrier()
        self.seconds.setdefault(name, []).append(time.perf_counter() - start)


def pieces(matrix, size, dim):
    """A matrix cut into equal pieces, after zeros that make its length a multiple of ``size``."""
    missing = -matrix.shape[dim] % size
    padded = torch.nn.functional.pad(matrix, (0, 0, 0, missing) if dim == 0 else (0, missing))
    return [piece.contiguous() for piece in padded.chunk(size, dim)]


def scattered(matrix, world, dim, shape):
    """This rank's piece of a matrix of ``shape`` that rank 0 holds."""
    height, width = shape
    length = -(-shape[dim] // world.size)
    piece = torch.empty((length, width) if dim == 0 else (height, length))
    dist.scatter(piece, pieces(matrix, world.size, dim) if world.is_root else None, src=0)
    return piece


def by_row(a, b, m, k, n, world, phase):
    """A (m, k) cut by rows, B (k, n) on every rank: each computes rows of C (m, n), which rank 0 gathers."""
    with phase("scatter the rows of A"):
        rows = scattered(a, world, 0, (m, k))
    with phase("broadcast B"):
        whole = b if world.is_root else torch.empty(k, n)
        dist.broadcast(whole, src=0)
    with phase("multiply"):
        part = rows @ whole
    with phase("gather the rows of C"):
        parts = [torch.empty_like(part) for _ in range(world.size)] if world.is_root else None
        dist.gather(part, parts, dst=0)
    return torch.cat(parts)[:m] if world.is_root else None


def by_reduction(a, b, m, k, n, world, phase):
    """A cut by columns, B by rows: each rank computes a term of C (m, n), which are summed on rank 0."""
    with phase("scatter the columns of A"):
        columns = scattered(a, world, 1, (m, k))
    with phase("scatter the rows of B"):
        rows = scattered(b, world, 0, (k, n))
    with phase("multiply"):
        term = columns @ rows
    with phase("sum the terms of C"):
        dist.reduce(term, dst=0)
    return term if world.is_root else None


def moved(m, k, n, p):
    """Numbers that all ranks together receive in each phase, at least, and the formula; pieces as padded with zeros."""
    high, deep = -(-m // p), -(-k // p)
    return {
        by_row: {
            "scatter the rows of A": ((p - 1) * high * k, "(p-1)/p mk"),
            "broadcast B": ((p - 1) * k * n, "(p-1) kn"),
            "multiply": (0, ""),
            "gather the rows of C": ((p - 1) * high * n, "(p-1)/p mn"),
        },
        by_reduction: {
            "scatter the columns of A": ((p - 1) * m * deep, "(p-1)/p mk"),
            "scatter the rows of B": ((p - 1) * deep * n, "(p-1)/p kn"),
            "multiply": (0, ""),
            "sum the terms of C": ((p - 1) * m * n, "(p-1) mn"),
        },
    }


def tolerance(k):
    """How far two sums of the same k products of normal numbers may lie apart in float32.

    Added up in blocks, their rounding grows like the root of k; one after the other like k, since a partial sum of j
    of them is as large as the root of j and is rounded, too.
    """
    return max(1e-5 * k**0.5, 1e-6 * k)


def multiply(way, size, repeats, world):
    """C = A @ B by one of the two ways, checked against the whole product; median seconds of its phases."""
    m, k, n = size
    a, b = (torch.randn(m, k), torch.randn(k, n)) if world.is_root else (None, None)
    phase = Phases()
    for _ in range(repeats):
        c = way(a, b, m, k, n, world, phase)
    difference = (c - a @ b).abs().max().item() if world.is_root else 0.0
    require(difference <= tolerance(k), f"the product by {way.__name__} differs from the whole one by {difference:g}")
    return {name: statistics.median(seconds) for name, seconds in phase.seconds.items()}, difference


def show_products(size, repeats, world):
    m, k, n = size
    transfers = moved(m, k, n, world.size)
    for way, title in ((by_row, "partition by row"), (by_reduction, "partition by reduction")):
        seconds, difference = multiply(way, size, repeats, world)
        if not world.is_root:
            continue
        print(f"\n{title}: largest difference from the whole product {difference:.2g}")
        print(f"  {'phase':<26} {'ms':>9} {'bytes':>12}   formula (numbers of {BYTES} bytes)")
        for name, (numbers, formula) in transfers[way].items():
            print(f"  {name:<26} {1000 * seconds[name]:9.3f} {BYTES * numbers:12d}   {formula}".rstrip())
        total = BYTES * sum(numbers for numbers, _ in transfers[way].values())
        print(f"  {'all':<26} {1000 * sum(seconds.values()):9.3f} {total:12d}", flush=True)


def main(args):
    world = hk.init_process_group("gloo")
    hk.pin_device(world, "cpu", args.num_threads)
    torch.manual_seed(args.seed)
    print(f"My rank is {world.rank}, same as {dist.get_rank()}", flush=True)
    dist.barrier()
    show_operations(world)
    show_products((args.m, args.k, args.n), args.repeats, world)
    if world.is_root:
        print(f"\nA is (m, k) = ({args.m}, {args.k}), B (k, n) = ({args.k}, {args.n}), p = {world.size} ranks.")
        print("Times: rank 0, median, from a barrier to a barrier; ranks on one machine share its cores and memory.")
        print("Bytes: what all ranks together must receive; what a library does inside may be more.")


def add_flags(add):
    for name, meaning in (("m", "rows of A and C"), ("k", "columns of A, rows of B"), ("n", "columns of B and C")):
        add(f"--{name}", type=flags.whole(1), default=512, help=meaning)
    add("--repeats", type=flags.whole(1), default=5, help="products, of whose times the median is shown")


if __name__ == "__main__":
    flags.run(main, __doc__, only=("num_threads", "seed"), add=add_flags)
