"""Rules about single calls: in the wrong order, by the wrong number, on the wrong ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check import step_device, step_gradients
from hvdkit.prepare.check.call_arguments import arguments
from hvdkit.prepare.check.collectives import side
from hvdkit.prepare.check.facts import argument, has_stars, is_constant, method, words
from hvdkit.prepare.check.libraries import NUMBERS, SAMPLERS, TOGETHER, Role
from hvdkit.prepare.check.steps import JudgedCase
from hvdkit.prepare.check.trace import Event

_FETCHES = (
    "urllib.request.urlretrieve", "wget.download", "gdown.download", "torch.hub.download_url_to_file",
    "torchvision.datasets.utils.download_url", "torchvision.datasets.utils.download_and_extract_archive",
    "keras.utils.get_file",
)  # fmt: skip
_FETCHERS = re.compile(r"(wget|curl)\b")
_NEED_INIT = (Role.DISTRIBUTE, Role.PIN, Role.SCALE, Role.SHARD, Role.CHECKPOINTS)
_REDUCE_TO_LOCAL = (ast.Mod, ast.Sub, ast.FloorDiv)
_DATA_SETS = ("torchvision.", "torchaudio.", "torchtext.", "torch_geometric.", "medmnist.")


# Rank and size --------------------------------------------------------------------------------------------------------


def called_values(case: JudgedCase) -> Iterator[Event]:
    """``world.rank()``: hvdkit's topology has numbers, not functions."""
    for event in case.events:
        if isinstance(event.node.func, ast.Attribute) and case.is_topology(event.node.func):
            yield event


def before_init(case: JudgedCase) -> Iterator[Event]:
    """The first call that needs the library, where it comes before init."""
    starts = [one for one in case.having(Role.INIT, Role.FIT) if not case.name(one.node).startswith("mpi4py")]
    if not starts or not starts[0].reached or "torch.distributed.rpc" in case.others:
        return
    root = case.name(starts[0].node).split(".")[0]
    for event in case.having(*NUMBERS, *TOGETHER, *_NEED_INIT):
        if event.order > starts[0].order or not event.reached:
            return
        if not case.on_ranks(event):
            continue
        asked = any(re.search("is_initialized|is_available", ast.unparse(guard.test)) for guard in event.guards)
        if case.name(event.node).split(".")[0] == root and not asked:
            yield event
            return


# Devices --------------------------------------------------------------------------------------------------------------


def pinned_by_global_rank(case: JudgedCase) -> Iterator[ast.expr]:
    """The first line that takes the rank in the job for the number of a GPU."""
    for chosen in sorted(step_device.device_choices(case), key=lambda one: one.lineno):
        reached = case.reach(chosen)
        sums = [one for one in reached if isinstance(one, ast.BinOp) and isinstance(one.op, _REDUCE_TO_LOCAL)]
        reckoned = any(not isinstance(one.left, (ast.Constant, ast.JoinedStr)) for one in sums)  # "cuda:%d" % rank
        named_local = any("local" in word for one in reached for word in words(one))
        if case.kinds(chosen) == {Role.RANK} and not reckoned and not named_local:
            yield chosen
            return


# Gradients ------------------------------------------------------------------------------------------------------------


def not_distributed(case: JudgedCase) -> Iterator[Event | int]:
    """Where gradients stay on their rank."""
    yield from case.verdicts[3].blamed
    yield from step_gradients.undistributed(case)
    if case.library == "ddp":
        yield from step_gradients.unwrapped_models(case)


# Data -----------------------------------------------------------------------------------------------------------------


def sampler_without_ranks(case: JudgedCase) -> Iterator[Event]:
    """``DistributedSampler(dataset)`` in a script that has no process group of PyTorch."""
    if case.library == "ddp" or any(name.startswith("torch.distributed.") for name in case.used) or case.strangers():
        return
    for event in case.events:
        told = argument(event.node, "num_replicas", 1) is not None and argument(event.node, "rank", 2) is not None
        if case.name(event.node) in SAMPLERS and not told and not has_stars(event.node) and event.reached:
            yield event


def downloads(case: JudgedCase) -> Iterator[Event]:
    """Downloads that nothing keeps to one rank of a host."""
    waits = [event.order for event in case.having(Role.BARRIER) if case.where(event) == "some ranks"]
    for event in case.events:
        if waits and waits[0] < event.order:
            return
        if not _downloads(case, event.node) or case.where(event) != "every rank" or case.is_locked(event):
            continue
        if not any(case.has_rank(one) for one in arguments(event.node)):
            yield event


def _downloads(case: JudgedCase, call: ast.Call) -> bool:
    name = case.name(call)
    if name.startswith(("os.system", "os.popen", "subprocess.")):
        return any(isinstance(one, ast.Constant) and _FETCHERS.match(str(one.value)) for one in ast.walk(call))
    return name in _FETCHES or (name.startswith(_DATA_SETS) and is_constant(argument(call, "download"), True))


def downloads_without_barrier(case: JudgedCase) -> Iterator[Event]:
    """Downloads on one rank that the next use of the same data set on all ranks does not wait for."""
    for event in case.events:
        if not _downloads(case, event.node) or side(case, event) is None or not event.reached:
            continue
        name = case.name(event.node)
        after = [one for one in case.events if one.order > event.order]
        used = next((one for one in after if case.name(one.node) == name and not _downloads(case, one.node)), None)
        if used is None or case.where(used) != "every rank" or name in _FETCHES:
            continue
        between = [one for one in after if one.order < used.order]
        together = any(case.role(one.node) in (*TOGETHER, Role.INIT) for one in between)
        unsure = any(case.is_opaque(one.node) or method(one.node) in ("sleep", "wait", "exists") for one in between)
        if not together and not unsure:
            yield event
