"""The many ways in which scripts say one thing, and what must not be mistaken for them."""

import ast
from textwrap import dedent, indent

import pytest

from hvdkit.prepare.check.report import check_script
from hvdkit.prepare.check.source import Script
from hvdkit.prepare.check.steps import JudgedCase

SCRIPT = """
import os
import sys
import torch
import torch.distributed as dist
import horovod.torch as hvd
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
{imports}

def main(args=None):
    hvd.init()
    data = TensorDataset(torch.load("x.pt"), torch.load("y.pt"))
    sampler = DistributedSampler(data, num_replicas=hvd.size(), rank=hvd.rank())
    loader = DataLoader(data, 32, sampler=sampler)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 * hvd.size())
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
    best = 1e9
    for epoch in range(3):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
{body}

if __name__ == "__main__":
    main()
"""
SAVE = "torch.save(model.state_dict(), 'model.pt')"


def rules(body: str, imports: str = "") -> list[str]:
    """The rules that a training breaks with ``body`` at the end of each epoch and ``imports`` on module level."""
    text = SCRIPT.format(imports=dedent(imports), body=indent(dedent(body).strip(), " " * 8))
    return [finding.rule for finding in check_script(Script("script.py", ast.parse(text))).findings]


def test_the_script_itself_is_correct() -> None:
    assert rules("pass") == []


GUARDS = [
    f"if hvd.rank() == 0: {SAVE}",
    f"if not hvd.rank(): {SAVE}",
    f"if hvd.rank() == 0 and epoch % 2 == 0: {SAVE}",
    f"if epoch % 2 == 0 and 0 == hvd.rank(): {SAVE}",
    f"if hvd.rank() < 1: {SAVE}",
    f"if hvd.rank() != 0: pass\nelse: {SAVE}",
    f"if hvd.rank() != 0: continue\n{SAVE}",
    f"if hvd.rank() > 0:\n    if epoch: print('later')\n    continue\n{SAVE}",
    f"rank = hvd.rank()\nif rank == 0: {SAVE}",
    f"is_root = hvd.rank() == 0\nif loss < best and is_root: {SAVE}",
    f"verbose = 0\nif hvd.rank() == 0: verbose = 1\nif verbose: {SAVE}",
    f"verbose = 1 if hvd.rank() == 0 else 0\nif verbose: {SAVE}",
    f"path = 'model.pt' if hvd.rank() == 0 else None\nif path: {SAVE}",
    f"hvd.rank() == 0 and {SAVE}",
    f"{SAVE} if hvd.rank() == 0 else None",
    f"world = {{'rank': hvd.rank()}}\nif world['rank'] == 0: {SAVE}",
    f"match hvd.rank():\n    case 0:\n        {SAVE}",
    f"if hvd.local_rank() == 0 and hvd.cross_rank() == 0: {SAVE}",
    f"if int(os.environ['OMPI_COMM_WORLD_RANK']) == 0: {SAVE}",
    f"if args.rank == 0: {SAVE}",
    f"if (hvd.rank() == 0) if hvd.is_initialized() else True: {SAVE}",
    f"while hvd.rank() == 0:\n    {SAVE}\n    break",
    f"def save():\n    {SAVE}\nif hvd.rank() == 0: save()",
    f"def save():\n    if hvd.rank() != 0: return\n    {SAVE}\nsave()",
    f"save = lambda: {SAVE}\nif hvd.rank() == 0: save()",
]


@pytest.mark.parametrize("body", GUARDS)
def test_a_guarded_checkpoint_is_no_finding(body: str) -> None:
    assert rules(body) == []


@pytest.mark.parametrize(
    ("imports", "body"),
    [
        ("def is_main():\n    return hvd.rank() == 0", f"if is_main(): {SAVE}"),
        ("def is_main():\n    if hvd.rank() == 0:\n        return True\n    return False", f"if is_main(): {SAVE}"),
        ("is_main = lambda: hvd.rank() == 0", f"if is_main(): {SAVE}"),
        ("from mpi4py import MPI\ncomm = MPI.COMM_WORLD", f"if comm.Get_rank() == 0: {SAVE}"),
        ("from mpi4py import MPI", f"if MPI.COMM_WORLD.rank == 0: {SAVE}"),
        ("from tools import is_main_process", f"if is_main_process(): {SAVE}"),
        ("from tools import should_save", f"if should_save(epoch): {SAVE}"),
        ("from tools import *", f"if chosen(): {SAVE}"),
        (
            "from tools import rank_zero_only\n@rank_zero_only\ndef save(state):\n    torch.save(state, 'm.pt')",
            "save(model.state_dict())",
        ),
        (
            "class World:\n    def __init__(self):\n        self.number = hvd.rank()\n"
            "    @property\n    def first(self):\n        return self.number == 0",
            f"world = World()\nif world.first: {SAVE}",
        ),
        ("def save(state, rank):\n    if rank == 0: torch.save(state, 'm.pt')", "save(model.state_dict(), hvd.rank())"),
        ("def save(*args):\n    if hvd.rank() == 0:\n        torch.save(*args)", "save(model.state_dict(), 'm.pt')"),
    ],
)  # fmt: skip
def test_a_guard_in_a_function_a_class_or_another_module_is_no_finding(imports: str, body: str) -> None:
    assert rules(body, imports) == []


@pytest.mark.parametrize(
    "body",
    [
        "torch.save(model.state_dict(), f'model-{hvd.rank()}.pt')",
        "torch.save(model.state_dict(), 'model-%d.pt' % hvd.rank())",
        "name = 'model-{}.pt'.format(hvd.rank())\ntorch.save(model.state_dict(), name)",
        "import io\nbuffer = io.BytesIO()\ntorch.save(model.state_dict(), buffer)",
        f"if hvd.size() == 1: {SAVE}",
        f"def never():\n    {SAVE}",
    ],
)
def test_a_file_of_its_own_for_each_rank_is_no_finding(body: str) -> None:
    assert rules(body) == []


@pytest.mark.parametrize(
    "body",
    [
        SAVE,
        f"if epoch % 2 == 0: {SAVE}",
        f"if loss < best:\n    best = loss\n    {SAVE}",
        f"if hvd.size() > 1: {SAVE}",
        f"if hvd.rank() == 0: print(epoch)\n{SAVE}",
        f"for _ in range(1):\n    if hvd.rank() != 0: continue\n{SAVE}",
        f"try:\n    {SAVE}\nexcept OSError:\n    pass",
        f"with torch.no_grad():\n    {SAVE}",
        f"def save():\n    {SAVE}\nif hvd.rank() == 0: save()\nsave()",
        "name = f'model-{epoch}.pt'\ntorch.save(model, name)",
    ],
)
def test_a_checkpoint_that_every_rank_writes_is_found(body: str) -> None:
    assert rules(body) == ["checkpoint-on-every-rank"]


@pytest.mark.parametrize(
    "body",
    [
        "if hvd.rank == 0: print(epoch)",
        "print(epoch) if hvd.rank == 0 else None",
        "if hvd.size > 1: print(epoch)",
        "share = epoch / hvd.size",
        "if not hvd.rank: print(epoch)",
        "print(f'{hvd.rank}')",
        "print('%d' % hvd.rank)",
        "print('rank {}'.format(hvd.rank))",
        "print(hvd.local_rank)",
        "rank = hvd.rank\nif rank == 0: print(epoch)",
        "rank, size = hvd.rank, hvd.size()\nif rank == 0: print(epoch)",
        "world = {'rank': hvd.rank}\nif world['rank'] == 0: print(epoch)",
        "def first(rank):\n    return rank == 0\nif first(hvd.rank): print(epoch)",
        "os.environ['CUDA_VISIBLE_DEVICES'] = str(hvd.local_rank)",
        "order = list(range(100))[hvd.rank::2]",
    ],
)
def test_a_function_used_as_a_number_is_found(body: str) -> None:
    assert rules(body) == ["rank-not-called"]


@pytest.mark.parametrize(
    "body",
    [
        "get = hvd.rank\nif get() == 0: print(epoch)",
        "functions = [hvd.rank, hvd.size]\nprint([one() for one in functions])",
        "def call(function):\n    return function()\nprint(call(hvd.rank))",
        "rank = getattr(hvd, 'rank')()\nif rank == 0: print(epoch)",
        "from mpi4py import MPI\nif MPI.COMM_WORLD.rank == 0: print(epoch)",
        "if hvd.rank is not None: print(epoch)",
    ],
)
def test_a_function_that_is_called_later_is_no_finding(body: str) -> None:
    assert rules(body) == []


MEAN = "hvd.allreduce(loss)"


@pytest.mark.parametrize(
    "body",
    [
        f"if hvd.rank() == 0: {MEAN}",
        f"if not hvd.rank(): print({MEAN})",
        f"if hvd.rank() != 0: print(epoch)\nelse: {MEAN}",
        f"if hvd.rank() != 0: continue\n{MEAN}",
        f"if hvd.rank() > 0: {MEAN}",
        f"if hvd.local_rank() == 0: {MEAN}",
        f"rank = hvd.rank()\nif rank == 0 and epoch > 1: {MEAN}",
        f"hvd.rank() == 0 and {MEAN}",
        f"print({MEAN}) if hvd.rank() == 0 else None",
        f"log = print if hvd.rank() == 0 else None\nif log: log({MEAN})",
        "if hvd.rank() == 0: hvd.broadcast_parameters(model.state_dict(), root_rank=0)",
        "if hvd.rank() == 0: hvd.barrier()",
        f"def mean():\n    return {MEAN}\nif hvd.rank() == 0: print(mean())",
        f"def mean():\n    def inner():\n        return {MEAN}\n    return inner()\nif hvd.rank() == 0: print(mean())",
    ],
)
def test_a_collective_on_one_branch_is_found(body: str) -> None:
    assert rules(body) == ["collective-on-some-ranks"]


@pytest.mark.parametrize(
    "body",
    [
        MEAN,
        f"if hvd.size() > 1: {MEAN}",
        f"if epoch == 0: {MEAN}",
        f"mean = {MEAN}\nif hvd.rank() == 0: print(mean)",
        "if hvd.rank() == 0: hvd.broadcast_object(epoch, 0)\nelse: epoch = hvd.broadcast_object(None, 0)",
        "if hvd.rank() == 0: hvd.broadcast_object(epoch, 0)\nif hvd.rank() != 0: epoch = hvd.broadcast_object(None, 0)",
        "if hvd.rank() != 0: hvd.barrier()\nprint(epoch)\nif hvd.rank() == 0: hvd.barrier()",
        "if hvd.rank() == 0: hvd.allreduce(loss, process_set=hvd.ProcessSet([0]))",
        "for rank in range(hvd.size()):\n    if rank == hvd.rank(): print(rank)\n    hvd.barrier()",
        f"state = epoch if hvd.rank() == 0 else None\nstate = hvd.broadcast_object(state, 0)\nif state: {MEAN}",
        f"if hvd.rank() < epoch: {MEAN}",
        f"if args.rank == 0: {MEAN}",
    ],
)
def test_a_collective_that_all_ranks_reach_is_no_finding(body: str) -> None:
    assert rules(body) == []


CHECKPOINT = {
    "a broadcast of something else does not send what was loaded": (
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "    if hvd.rank() == 0:\n        model.load_state_dict(torch.load('m.pt'))\n"
        "    hvd.broadcast_optimizer_state(optimizer, root_rank=0)\n",
        ["broadcast-too-early"],
    ),
    "the same one again does": (
        "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
        "    if hvd.rank() == 0:\n        model.load_state_dict(torch.load('m.pt'))\n"
        "    hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n",
        [],
    ),
}


@pytest.mark.parametrize(("sent", "expected"), CHECKPOINT.values(), ids=CHECKPOINT)
def test_what_is_loaded_after_a_broadcast_must_be_sent_again(sent: str, expected: list[str]) -> None:
    once = "hvd.broadcast_parameters(model.state_dict(), root_rank=0)\n"
    text = SCRIPT.format(imports="", body="        pass").replace(once, sent)
    assert [finding.rule for finding in check_script(Script("script.py", ast.parse(text))).findings] == expected


@pytest.mark.parametrize(
    ("imports", "body"),
    [
        ("import horovod.spark", SAVE),  # the driver's text is not what every rank runs
        ("from lightning.pytorch.callbacks import ModelCheckpoint", "ModelCheckpoint(dirpath='runs')"),  # asks the rank
    ],
)
def test_a_checkpoint_of_another_package_is_no_finding(imports: str, body: str) -> None:
    assert rules(body, imports) == []


METER = """
class Meter:
    def __init__(self):
        self.correct = torch.zeros(1)
    def add(self, value):
        self.correct += value
"""
REDUCES = "    def reduce(self):\n        dist.all_reduce(torch.tensor([self.correct]))\n"
"""In a way whose result the text does not lead to: what it is given may be averaged, so that nothing is certain."""


@pytest.mark.parametrize(
    ("imports", "average", "expected"),
    [(METER + REDUCES, "meter.reduce()", []), (METER, "pass", ["metrics-not-averaged"])],
)
def test_a_meter_may_average_itself(imports: str, average: str, expected: list[str]) -> None:
    loader = "test_loader = DataLoader(data, 32, sampler=DistributedSampler(data, hvd.size(), hvd.rank()))\n"
    loop = "meter = Meter()\nfor x, y in test_loader:\n    meter.add((model(x) == y).sum())\n"
    assert rules(f"{loader}{loop}{average}\nprint('accuracy', meter.correct)", imports) == expected


def test_what_a_value_comes_from_is_met_in_one_order() -> None:
    """What a message names must not depend on where in memory a script's nodes are."""
    names = [f"value_{number}" for number in range(20)]
    case = JudgedCase(ast.parse("\n".join(f"{one} = {other}" for one, other in zip(names[1:], names, strict=False))))
    last = next(node for node in case.nodes if isinstance(node, ast.Assign) and node.lineno == len(names) - 1)
    assert [node.id for node in case.reach(last.value) if isinstance(node, ast.Name)] == names[-2::-1]
