"""What each rank does in the tests of examples/pytorch: resnet9.py, and the course's mlp, collectives and own_ddp."""

import contextlib
import copy
import importlib.util
import io
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

import hvdkit.torch as hk

EXAMPLES = Path(__file__).parents[2] / "examples" / "pytorch"


def example(script: str, flags: list[str]) -> dict[str, Any]:
    """An example of the repository, run as a user would: its exit status and what it printed."""
    path = EXAMPLES / script
    printed, said = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        contextlib.redirect_stderr(said),
        mock.patch.object(sys, "argv", [str(path), *flags]),
        mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]),
    ):
        try:
            runpy.run_path(str(path), run_name="__main__")
            status: Any = None
        except SystemExit as end:
            status = end.code
    return {"status": status, "lines": printed.getvalue().splitlines(), "said": said.getvalue()}


@contextlib.contextmanager
def one_process_group() -> Iterator[None]:
    """Several examples in one process: the process group of the first one serves all, to the end."""
    start, started = hk.init_process_group, []

    def once(*backend: str) -> Any:
        if not started:
            started.append(start(*backend))
        return started[0]

    with mock.patch.object(hk, "init_process_group", once), mock.patch.object(dist, "destroy_process_group"):
        yield


def examples(runs: dict[str, tuple[str, list[str]]]) -> dict[str, dict[str, Any]]:
    """Several, by a name for each, one after the other in one process: to import PyTorch takes longest."""
    return {name: example(script, flags) for name, (script, flags) in runs.items()}


def course(runs: dict[str, tuple[str, list[str]]], own: list[str]) -> dict[str, dict[str, Any]]:
    """Examples, and mlp.py's agreement check and own_ddp.py's classes in cases that no flag brings about."""
    with one_process_group():
        return {"own": own_ddp(own), "check": agreement_check(), **examples(runs)}


def deepspeed(runs: list[list[str]]) -> list[dict[str, Any]]:
    """cnn_deepspeed.py several times in one process, without dropout.

    Its masks are each rank's own, so that with them no number of ranks can compute what another one does.
    """
    with one_process_group(), mock.patch.object(nn, "Dropout", lambda _: nn.Identity()):
        results = [example("cnn_deepspeed.py", [*flags, "--device", "cpu"]) for flags in runs]
    for flags, result in zip(runs, results, strict=True):
        if "--checkpoint_dir" in flags and result["status"] == 0:
            directory = Path(flags[flags.index("--checkpoint_dir") + 1])
            newest = directory / (directory / "latest").read_text() / "mp_rank_00_model_states.pt"
            weights = torch.load(newest, weights_only=True)["module"]
            result["weights"] = [tensor.flatten()[:20].tolist() for tensor in weights.values()]
    return results


def module_of(name: str) -> ModuleType:
    with mock.patch.object(sys, "path", [str(EXAMPLES), *sys.path]):
        spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module


def message_of(call: Any, *arguments: Any) -> str:
    try:
        call(*arguments)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def agreement_check() -> dict[str, str]:
    """What mlp.py's check says of ranks that are alike, and of ranks that differ in one weight."""
    check = module_of("mlp").check_parameter_closeness
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    alike = message_of(check, model)
    with torch.no_grad():
        model[1].weight[1, 2] += 1e-7 * dist.get_rank()
    return {"alike": alike, "unlike": message_of(check, model)}


class Branches(nn.Module):
    """Four layers, of which one takes part only when asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 40), nn.Linear(40, 40)
        self.sometimes, self.last = nn.Linear(40, 40), nn.Linear(40, 3)

    def forward(self, x: torch.Tensor, all_of_it: bool = True) -> torch.Tensor:
        x = self.second(self.first(x).relu()).relu()
        return self.last(self.sometimes(x) if all_of_it else x)


def own_ddp(flags: list[str]) -> dict[str, Any]:
    """own_ddp.py; then what its classes do with gradients in unusual cases, and its verdict on wrong weights."""
    result = example("own_ddp.py", flags)
    own = module_of("own_ddp")
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = Branches()
    wrapped = own.MyDP(model, bucket_mb=0.002)
    plain = copy.deepcopy(model)
    for parameter in plain.parameters():
        parameter.grad = None
    result["buckets"] = [[parameter.numel() for parameter in bucket.parameters] for bucket in wrapped.buckets]
    result["first weights"] = [round(value, 5) for value in model.first.bias.tolist()]

    def difference() -> float:
        """The largest between MyDP's gradients and the mean of the ranks' own."""
        worst = 0.0
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            mean = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad.clone()
            dist.all_reduce(mean)
            worst = max(worst, (mine.grad - mean / size).abs().max().item())
        return worst

    x = torch.randn(5, 6)  # of this rank
    result["differences"] = differences = {}
    for case in ("plain", "again, accumulated", "zero_grad after the forward pass", "gradients set to zero"):
        if case == "gradients set to zero":
            model.zero_grad(set_to_none=False)
            plain.zero_grad(set_to_none=False)
        output = wrapped(x)
        if case == "zero_grad after the forward pass":
            model.zero_grad()
            plain.zero_grad()
        output.square().sum().backward()
        plain(x).square().sum().backward()
        differences[case] = difference()
    model.zero_grad()
    plain.zero_grad()
    for each in (wrapped, plain):
        each(x, False).square().sum().backward()
    differences["a parameter takes no part"] = difference()
    result["in the buffer"] = all(
        parameter.grad is view
        for bucket in wrapped.buckets
        for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
    )

    with mock.patch.object(torch.cuda, "synchronize") as wait:
        own.wait_for(torch.device("cuda"))
        own.wait_for(torch.device("cpu"))
    result["waits"] = [call.args[0].type for call in wait.call_args_list]
    with mock.patch.object(own, "wait_for") as wait:
        own.step(model, torch.optim.SGD(model.parameters(), lr=0.0), x, torch.zeros(5, dtype=torch.long))
    result["waits"] += [call.args[0].type for call in wait.call_args_list]
    frozen = nn.Linear(6, 3)
    frozen.bias.requires_grad_(False)
    own.NaiveDP(frozen)(x).sum().backward()  # a frozen parameter has no gradient to hook

    right, wrong = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        wrong.last.bias[0] += 2e-5 * rank
    for name, other in (("right", right), ("wrong", wrong)):
        trained = {"buckets": (None, other, None), "DDP": (None, right, None), "Horovod": (None, right, None)}
        with contextlib.redirect_stdout(io.StringIO()):
            times = {key: [0.1] for key in trained}
            result[name] = message_of(own.report, mock.Mock(is_root=rank == 0), trained, times)
    return result
