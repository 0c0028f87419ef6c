"""Rules about single calls: in the wrong order, by the wrong number, on the wrong ranks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from hvdkit.prepare.check import step_device, step_gradients
from hvdkit.prepare.check.calls import argument, arguments, has_stars, is_constant, method, word
from hvdkit.prepare.check.collectives import side
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


def called_values(case: JudgedCase) -> Iterator[Event]:
    """``world.rank()``: hvdkit's topology has numbers, not functions."""
    for event in case.events:
        if isinstance(event.node.func, ast.Attribute) and case.is_topology(event.node.func):
            yield event


def before_init(case: JudgedCase) -> Iterator[Event]:
    """The first call that needs the library, where it comes before init."""
    starts = step_device.starts(case)
    if not starts or not starts[0].reached or "torch.distributed.rpc" in case.others:
        return
    root = case.name(starts[0].node).split(".")[0]
    for event in case.having(*NUMBERS, *TOGETHER, *_NEED_INIT):
        if event.order > starts[0].order or not event.reached:
            return
        asked = any(re.search("is_initialized|is_available", ast.unparse(guard.test)) for guard in event.guards)
        if case.name(event.node).split(".")[0] == root and case.on_ranks(event) and not asked:
            yield event
            return


def pinned_by_global_rank(case: JudgedCase) -> Iterator[ast.expr]:
    """The first line that takes the rank in the job for the number of a GPU."""
    for chosen in sorted(step_device.device_choices(case), key=lambda one: one.lineno):
        reached = case.reach(chosen)
        sums = [one for one in reached if isinstance(one, ast.BinOp) and isinstance(one.op, _REDUCE_TO_LOCAL)]
        reckoned = any(not isinstance(one.left, (ast.Constant, ast.JoinedStr)) for one in sums)  # "cuda:%d" % rank
        named_local = any("local" in word(one) for one in reached)
        if case.kinds(chosen) == {Role.RANK} and not reckoned and not named_local:
            yield chosen
            return


def not_distributed(case: JudgedCase) -> Iterator[Event | int]:
    """Where gradients stay on their rank."""
    yield from case.verdicts[3].blamed
    yield from step_gradients.undistributed(case)
    if case.library == "ddp":
        yield from step_gradients.unwrapped_models(case)


def wrong_shards(case: JudgedCase) -> Iterator[Event]:
    """Calls that divide the data by the local rank, or with rank and size exchanged."""
    for event in case.events:
        call = event.node
        if case.name(call) in SAMPLERS:
            size, rank = argument(call, "num_replicas", 1), argument(call, "rank", 2)
        elif method(call) == "shard" and not case.name(call):
            size, rank = argument(call, "num_shards", 0), argument(call, "index", 1)
        else:
            continue
        given = (case.kinds(size), case.kinds(rank))
        if given in (({Role.RANK}, {Role.SIZE}), ({Role.SIZE}, {Role.LOCAL_RANK})) and event.reached:
            yield event


def sampler_without_ranks(case: JudgedCase) -> Iterator[ast.expr]:
    """``DistributedSampler(dataset)`` in a script that has no process group of PyTorch."""
    if case.library == "ddp" or any(name.startswith("torch.distributed.") for name in case.used) or case.strangers():
        return
    for call in (event.node for event in case.events if event.reached):
        told = argument(call, "num_replicas", 1) is not None and argument(call, "rank", 2) is not None
        if case.name(call) in SAMPLERS and not told and not has_stars(call):
            yield call.func


def downloads(case: JudgedCase) -> Iterator[Event]:
    """Downloads that nothing keeps to one rank of a host."""
    waits = [event.order for event in case.having(Role.BARRIER) if case.where(event) == "some ranks"]
    for event in case.events:
        if waits and waits[0] < event.order:
            return
        everywhere = _downloads(case, event.node) and case.where(event) == "every rank" and not case.is_locked(event)
        if everywhere and not case.has_rank(*arguments(event.node)):
            yield event


def _downloads(case: JudgedCase, call: ast.Call) -> bool:
    name = case.name(call)
    if name.startswith(("os.system", "os.popen", "subprocess.")):
        return any(isinstance(one, ast.Constant) and _FETCHERS.match(str(one.value)) for one in ast.walk(call))
    return name in _FETCHES or (name.startswith(_DATA_SETS) and is_constant(argument(call, "download"), True))


def downloads_without_barrier(case: JudgedCase) -> Iterator[Event]:
    """Downloads on one rank that the next use of the same data set on all ranks does not wait for."""
    for event in case.events:
        name = case.name(event.node)
        if name in _FETCHES or not _downloads(case, event.node) or side(case, event) is None or not event.reached:
            continue
        after = case.events[event.order + 1 :]
        used = next((one for one in after if case.name(one.node) == name and not _downloads(case, one.node)), None)
        if used is None or case.where(used) != "every rank":
            continue
        between = [one.node for one in after if one.order < used.order]
        together = any(case.role(call) in (*TOGETHER, Role.INIT) for call in between)
        unsure = any(case.is_opaque(call) or method(call) in ("sleep", "wait", "exists") for call in between)
        if not together and not unsure:
            yield event
