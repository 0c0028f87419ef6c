"""Rules about single calls: in the wrong order, by the wrong number, on the wrong ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hvdkit.prepare.check import step_device, step_gradients
from hvdkit.prepare.check.facts import argument, has_stars, is_constant, method, words
from hvdkit.prepare.check.libraries import (
    BARRIER,
    BROADCAST,
    COLLECTIVE,
    DISTRIBUTE,
    FIT,
    INIT,
    LOAD_MODEL,
    LOCAL_RANK,
    LOCAL_SIZE,
    RANK,
    REDUCE,
    SAMPLERS,
    SIZE,
)
from hvdkit.prepare.check.steps import Case
from hvdkit.prepare.check.trace import Event

_NUMBERS = (RANK, LOCAL_RANK, SIZE, LOCAL_SIZE)
_FETCHES = (
    "urllib.request.urlretrieve", "wget.download", "gdown.download", "torch.hub.download_url_to_file",
    "torchvision.datasets.utils.download_url", "torchvision.datasets.utils.download_and_extract_archive",
    "keras.utils.get_file",
)  # fmt: skip
_FETCHERS = re.compile(r"(wget|curl)\b")
_REDUCE_TO_LOCAL = (ast.Mod, ast.Sub, ast.FloorDiv)
_DATA_SETS = ("torchvision.", "torchaudio.", "torchtext.", "torch_geometric.", "medmnist.")


@dataclass(frozen=True)
class Spot:
    """A line, and the piece of the script that a rule is about; "" where the rule's words are enough."""

    line: int
    subject: str = ""


def at(events: Iterable[Event]) -> Iterator[Spot]:
    """The spots of events."""
    return (Spot(event.node.lineno, text(event.node.func)) for event in events)


def text(node: ast.expr) -> str:
    """A piece of a script on one line."""
    return ast.unparse(node)


# Rank and size --------------------------------------------------------------------------------------------------------


def called_values(case: Case) -> Iterator[Spot]:
    """``world.rank()``: hvdkit's topology has numbers, not functions."""
    for event in case.facts.events:
        called = event.node.func
        if isinstance(called, ast.Attribute) and case.facts.is_topology(called):
            yield Spot(event.node.lineno, text(called))


def before_init(case: Case) -> Iterator[Spot]:
    """The first call that needs the library, where it comes before init."""
    facts = case.facts
    starts = [one for one in facts.having(INIT, FIT) if not facts.name(one.node).startswith("mpi4py")]
    if not starts or not starts[0].reached:
        return
    root = facts.name(starts[0].node).split(".")[0]
    for event in facts.having(*_NUMBERS, DISTRIBUTE, BROADCAST, REDUCE, COLLECTIVE, BARRIER):
        if event.order > starts[0].order or not event.reached:
            return
        asked = any(
            "is_initialized" in text(guard.test) or "is_available" in text(guard.test) for guard in event.guards
        )
        if facts.name(event.node).split(".")[0] == root and not asked:
            yield Spot(event.node.lineno, text(event.node.func))
            return


# Devices --------------------------------------------------------------------------------------------------------------


def pinned_by_global_rank(case: Case) -> Iterator[Spot]:
    """The first line that takes the rank in the job for the number of a GPU."""
    facts = case.facts
    for chosen in sorted(step_device.device_choices(facts), key=lambda one: one.lineno):
        reached = facts.flow.reach(chosen)
        sums = [one for one in reached if isinstance(one, ast.BinOp) and isinstance(one.op, _REDUCE_TO_LOCAL)]
        reckoned = any(not isinstance(one.left, (ast.Constant, ast.JoinedStr)) for one in sums)  # "cuda:%d" % rank
        named_local = any("local" in word for one in reached for word in words(one))
        if facts.kinds(chosen) == {RANK} and not reckoned and not named_local:
            yield Spot(chosen.lineno, text(chosen))
            return


# Gradients ------------------------------------------------------------------------------------------------------------


def not_distributed(case: Case) -> Iterator[Spot]:
    """Where gradients stay on their rank."""
    yield from (Spot(line) for line in case.verdicts[3].blamed)
    yield from at(step_gradients.undistributed(case.facts, case.training))
    if case.facts.library == "ddp":
        yield from at(step_gradients.unwrapped_models(case.facts))


def keras_3(case: Case) -> Iterator[Spot]:
    """Horovod's Keras optimizer, unless the script asks for the Keras that it was made for."""
    facts = case.facts
    legacy = any(isinstance(node, ast.Constant) and node.value == "TF_USE_LEGACY_KERAS" for node in facts.program.nodes)
    imports = {name.split(".")[0] for name in facts.names.imported}
    if legacy or "tf_keras" in imports or any(".legacy" in name for name in facts.used):
        return
    for event in facts.having(DISTRIBUTE, LOAD_MODEL):
        name = facts.name(event.node)
        if any("__version__" in text(guard.test) for guard in event.guards) or name.endswith("Tape"):
            continue
        wrapped = argument(event.node, "optimizer", 0)
        sources = facts.flow.calls(wrapped) if wrapped is not None else []
        on_keras = any(facts.name(call).startswith("keras.") for call in sources)
        if name.startswith(("horovod.keras.", "horovod.tensorflow.keras.")) or (
            name.startswith("horovod.tensorflow.") and on_keras
        ):
            yield Spot(event.node.lineno, text(event.node.func))


# Data -----------------------------------------------------------------------------------------------------------------


def sampler_without_ranks(case: Case) -> Iterator[Spot]:
    """``DistributedSampler(dataset)`` in a script that has no process group of PyTorch."""
    facts = case.facts
    if (
        facts.library == "ddp"
        or any(name.startswith("torch.distributed.") for name in facts.used)
        or facts.names.strangers()
    ):
        return
    for event in facts.events:
        told = argument(event.node, "num_replicas", 1) is not None and argument(event.node, "rank", 2) is not None
        if facts.name(event.node) in SAMPLERS and not told and not has_stars(event.node) and event.reached:
            yield Spot(event.node.lineno, text(event.node.func))


def downloads(case: Case) -> Iterator[Spot]:
    """Downloads that nothing keeps to one rank of a host."""
    facts = case.facts
    waits = [event.order for event in facts.having(BARRIER) if facts.where(event) == "some ranks"]
    for event in facts.events:
        if waits and waits[0] < event.order:
            return
        if not _downloads(case, event.node) or facts.where(event) != "every rank" or facts.is_locked(event):
            continue
        if not any(facts.has_rank(one) for one in [*event.node.args, *(word.value for word in event.node.keywords)]):
            yield Spot(event.node.lineno, text(event.node.func))


def _downloads(case: Case, call: ast.Call) -> bool:
    name = case.facts.name(call)
    if name.startswith(("os.system", "os.popen", "subprocess.")):
        return any(isinstance(one, ast.Constant) and _FETCHERS.match(str(one.value)) for one in ast.walk(call))
    return name in _FETCHES or (name.startswith(_DATA_SETS) and is_constant(argument(call, "download"), True))


def downloads_without_barrier(case: Case) -> Iterator[Spot]:
    """Downloads on one rank that the next use of the same data set on all ranks does not wait for."""
    facts = case.facts
    for event in facts.events:
        if not _downloads(case, event.node) or case.branches.side(event) is None or not event.reached:
            continue
        name = facts.name(event.node)
        after = [one for one in facts.events if one.order > event.order]
        used = next((one for one in after if facts.name(one.node) == name and not _downloads(case, one.node)), None)
        if used is None or facts.where(used) != "every rank" or name in _FETCHES:
            continue
        between = [one for one in after if one.order < used.order]
        together = any(facts.role(one.node) in (BARRIER, REDUCE, BROADCAST, COLLECTIVE, INIT) for one in between)
        unsure = any(
            facts.flow.is_opaque(one.node) or method(one.node) in ("sleep", "wait", "exists") for one in between
        )
        if not together and not unsure:
            yield Spot(event.node.lineno, text(event.node.func))
