"""What an allreduce costs on n ranks: messages one after the other, bytes through a link, bytes summed up.

A formula counts for the rank that has the most to do; time is ``alpha * messages + beta * moved + gamma * reduced``
(Hockney, Parallel Computing 20(3) (1994), 389-398, for alpha and beta; Thakur, Rabenseifner, Gropp, International
Journal of High Performance Computing Applications 19(1) (2005), 49-66, for gamma and the formulas but the ring's).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

RING = "ring"
HIERARCHICAL = "hierarchical"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a time is made of.

    Attributes:
        messages: one after the other.
        moved: bytes through the link that has the most to carry, in one direction.
        reduced: bytes of operands that one rank adds to its own.
    """

    messages: float = 0.0
    moved: float = 0.0
    reduced: float = 0.0


def ring(nbytes: float, n: int) -> Terms:
    """Reduce-scatter and allgather around a ring, any n: the fewest bytes that an allreduce can do with.

    Source: Patarasuk, Yuan, Journal of Parallel and Distributed Computing 69(2) (2009), 117-124.
    """
    return Terms(2.0 * (n - 1), 2.0 * (n - 1) / n * nbytes, (n - 1) / n * nbytes)


def recursive_doubling(nbytes: float, n: int) -> Terms:
    """The whole vector between partners at distance 1, 2, 4 ...; n that is no power of two is folded.

    Folded: with 2^k the largest power of two below n, n - 2^k ranks first give their vector to a partner and get the
    result at the end: two messages, twice the vector and one sum more. A larger n can thus cost less.
    """
    rounds = n.bit_length() - 1
    return _folded(Terms(rounds, rounds * nbytes, rounds * nbytes), nbytes, n)


def rabenseifner(nbytes: float, n: int) -> Terms:
    """Reduce-scatter by recursive halving, allgather by recursive doubling; folded as ``recursive_doubling`` is."""
    rounds = n.bit_length() - 1
    share = 1 - 1 / 2**rounds
    return _folded(Terms(2 * rounds, 2 * share * nbytes, share * nbytes), nbytes, n)


def tree(nbytes: float, n: int) -> Terms:
    """Reduce to one rank and broadcast from it, both by a binomial tree; of ceil(log2 n) rounds, any n."""
    rounds = (n - 1).bit_length()
    return Terms(2.0 * rounds, 2.0 * rounds * nbytes, float(rounds * nbytes))


def _folded(even: Terms, nbytes: float, n: int) -> Terms:
    if n & (n - 1) == 0:
        return even
    return Terms(even.messages + 2, even.moved + 2 * nbytes, even.reduced + nbytes)


FLAT: dict[str, Callable[[float, int], Terms]] = {
    RING: ring,
    "recursive_doubling": recursive_doubling,
    "rabenseifner": rabenseifner,
    "tree": tree,
}
"""The algorithms that do not ask which ranks share a host."""
ALGORITHMS = (*FLAT, HIERARCHICAL)


def shared(algorithm: str, nbytes: float, n: int, ppn: int) -> Terms:
    """An algorithm of ``FLAT`` over a network, where the ``ppn`` ranks of a host share its link.

    A ring in the order of hosts crosses each link once in each direction. In the others all ranks of a host talk to
    other hosts at the same time, so that the link carries what each of them moves: an upper bound, since their rounds
    at a distance below ppn stay within the host.
    """
    terms = FLAT[algorithm](nbytes, n)
    if algorithm == RING:
        return terms
    return Terms(terms.messages, terms.moved * min(ppn, n), terms.reduced)


def hierarchical(nbytes: float, n: int, ppn: int) -> tuple[Terms, Terms]:
    """Within each host first, then between hosts: the terms of the host's memory and those of the network.

    Ring reduce-scatter among the ``ppn`` ranks of a host; the p-th ranks of all hosts form a ring each and reduce the
    p-th part, all at the same time over shared links; ring allgather within the host. What a last host with fewer ranks
    saves is not counted. As Horovod's HOROVOD_HIERARCHICAL_ALLREDUCE does it; Jia et al. 2018, arXiv:1807.11205, for
    the idea.
    """
    hosts = -(-n // ppn)
    if hosts == 1:
        return ring(nbytes, n), Terms()
    between = ring(nbytes / ppn, hosts)
    return ring(nbytes, ppn), Terms(between.messages, between.moved * ppn, between.reduced)
