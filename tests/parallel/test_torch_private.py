"""What hvdkit uses of PyTorch's insides is as ``hvdkit/torch/private.py`` says; and what a step costs in calls."""

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from ranks import on_ranks

import hvdkit


@on_ranks("torch", n=1)
def test_a_graph_has_a_number_and_an_end(hk):
    """Also one within another, whose node is then known."""
    import torch
    from torch.utils.checkpoint import checkpoint

    from hvdkit.torch import private

    numbers, ended = [], []

    def end() -> None:
        node = private.current_node()
        ended.append(node and [following for following, _ in node.next_functions if following is not None])

    def hook(gradient: Any) -> None:
        numbers.append(private.current_graph_task())
        private.at_the_end_of_backward(end)

    inner, outer = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    inner.weight.register_hook(hook)
    outer.weight.register_hook(hook)
    x = torch.ones(1, 2, requires_grad=True)
    assert private.current_graph_task() == -1
    outer(checkpoint(inner, x, use_reentrant=True)).sum().backward()
    first, within = numbers
    assert first != within and -1 not in numbers
    inside, outside = ended
    assert inside and outside is None
    (outer.weight.sum()).backward()
    assert len(set(numbers)) == 3


@on_ranks("torch", n=1)
def test_an_error_frees_what_waits_for_the_end_of_a_graph(hk):
    import weakref

    import torch

    from hvdkit.torch import private

    class End:
        def __call__(self) -> None:
            raise AssertionError("the graph has not ended")

    weight, held = torch.nn.Parameter(torch.ones(2)), []

    def fail(gradient: Any) -> None:
        end = End()
        held.append(weakref.ref(end))
        private.at_the_end_of_backward(end)
        raise ArithmeticError

    weight.register_hook(fail)
    with pytest.raises(ArithmeticError):
        weight.sum().backward()
    assert held[0]() is None


@on_ranks("torch", n=1)
def test_a_hook_is_replaced_also_on_what_is_frozen(hk):
    import torch

    from hvdkit.torch import private

    weight, seen = torch.nn.Parameter(torch.ones(2)), []
    assert private.gradient_hooks(weight) is None
    handle = weight.register_post_accumulate_grad_hook(lambda _: seen.append("old"))
    weight.register_post_accumulate_grad_hook(lambda _: seen.append("the program's"))
    weight.requires_grad_(False)
    private.put_hook(handle, lambda _: seen.append("new"))
    weight.requires_grad_(True)
    weight.sum().backward()
    assert seen == ["new", "the program's"]
    assert len(private.gradient_hooks(weight)) == 2
    handle.remove()
    assert len(private.gradient_hooks(weight)) == 1


@on_ranks("torch", n=1)
def test_who_holds_a_gradient_is_counted(hk):
    import torch

    from hvdkit.torch import private

    def owners_of(parameter: Any) -> Any:
        gradients = [parameter.grad]
        return private.owners(gradients)[0]

    usual, parameters = private.owners_of_new(lists=1), []
    for _ in range(4):
        parameters.append(torch.nn.Parameter(torch.ones(3)))
        (parameters[-1] * 2).sum().backward()
    fresh, held, detached, shared = parameters
    keeps = [held.grad, detached.grad.detach()]
    shared.grad = torch.zeros(6)[:3]
    beside = shared.grad.untyped_storage()
    assert owners_of(fresh) == usual
    assert all(owners_of(one) != usual for one in (held, detached, shared))
    storage = private.storage_of(fresh.grad)
    before = private.storage_owners(storage)
    view = fresh.grad.view(3, 1)
    assert private.storage_owners(storage) == before + 1
    assert len(keeps) == 2 and beside is not None and view is not None


@on_ranks("torch", n=1)
def test_many_tensors_are_copied_and_overlaps_are_seen(hk):
    import torch

    from hvdkit.torch import private

    there = [torch.zeros(2), torch.zeros(2, 2)]
    private.foreach_copy(there, [torch.ones(2), 2 * torch.ones(2, 2)])
    assert [one.unique().tolist() for one in there] == [[1.0], [2.0]]
    assert private.overlaps_itself(torch.ones(1).expand(3))
    assert not private.overlaps_itself(torch.ones(3))


@on_ranks("torch", n=1)
def test_who_profiles_is_known(hk):
    import torch

    from hvdkit.torch import private

    assert not private.is_profiled()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert private.is_profiled()


@on_ranks("torch", n=1)
def test_what_runs_eagerly_is_not_traced(hk):
    import torch

    from hvdkit.torch import private

    compiled = []

    def hook(gradient: Any) -> None:
        compiled.append(torch.compiler.is_compiling())
        gradient.mul_(2)

    def marked(gradient: Any) -> None:
        compiled.append(torch.compiler.is_compiling())
        gradient.mul_(3)

    weight = torch.nn.Parameter(torch.ones(1))
    weight.register_hook(hook)
    weight.register_hook(private.eagerly(marked))

    @torch.compile(backend="eager")
    def step(x: Any) -> None:
        (weight * x).sum().backward()

    step(torch.ones(1))
    assert compiled == [True, False]
    assert weight.grad.item() == 6


@on_ranks("torch", n=1)
def test_callers_are_read(hk):
    from hvdkit.torch import private

    def inner() -> list[Any]:
        return list(private.variables_of_callers(but="/nowhere"))

    mine = object()
    held = inner()
    assert any(one is mine for one in held) and any(one is Counter for one in held)
    assert not any(one is mine for one in private.variables_of_callers(but=str(Path(__file__).parent)))


@on_ranks("torch", n=2)
def test_a_step_crosses_five_modules_and_calls_python_once_for_each_parameter(hk, world):
    import torch

    package = str(Path(hvdkit.__file__).parent)
    model = torch.nn.Sequential(*[torch.nn.Linear(3, 3) for _ in range(50)])
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), 0.1), model)
    hk.broadcast_state(model, optimizer)
    calls: Counter[str] = Counter()

    def count(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(package):
            calls[frame.f_code.co_filename.removeprefix(package)] += 1

    for step in range(12):  # an ordinary one: neither the first, nor one after which parameters are compared
        sys.setprofile(count if step == 11 else None)
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        optimizer.step()
    sys.setprofile(None)
    assert set(calls) == {
        "/torch/exchange.py",
        "/torch/backward.py",
        "/torch/buckets.py",
        "/observe/allreduce_counts.py",
        "/steps/passes.py",
    }
    assert calls["/torch/exchange.py"] + calls["/torch/buckets.py"] < 100 + 80


# What a GPU does: streams, and a thread for each device ---------------------------------------------------------------


class FakeStream:
    """What a bucket asks of a stream."""

    def __init__(self):
        self.waited_for = []

    def wait_stream(self, other):
        self.waited_for.append(other)


@pytest.mark.parametrize("streams", [1, 2])
@on_ranks("torch", n=1)
def test_a_bucket_waits_for_the_streams_on_which_its_gradients_came(hk, monkeypatch, streams):
    """And says that a gradient's memory is read on another than its own; where all came on one, it does neither."""
    import torch

    from hvdkit.core.layout import Flags
    from hvdkit.torch.buckets import Bucket

    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    bucket = Bucket([(str(number), parameter) for number, parameter in enumerate(parameters)], False)
    used = [FakeStream() for _ in range(streams)]
    recorded = []
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda self, stream: recorded.append((self, stream)))
    monkeypatch.setattr(bucket, "on_gpu", True)
    for number, parameter in enumerate(parameters):
        parameter.grad = torch.ones(3) * number
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, stream=used[number % streams]: stream)
        bucket.note_stream()
    gradients = [parameter.grad for parameter in parameters]
    bucket._take(Flags())
    assert used[-1].waited_for == used[:-1]
    assert [(id(tensor), stream) for tensor, stream in recorded] == [
        (id(gradient), used[-1]) for gradient in gradients if streams > 1
    ]
    assert bucket._flat[:6].tolist() == [0, 0, 0, 1, 1, 1]


@on_ranks("torch", n=1)
def test_a_monitor_waits_for_the_stream_of_a_number(hk, monkeypatch):
    """Its thread reads on another stream, which knows nothing of the one that computes."""
    import torch

    from hvdkit.steps.torch_tensors import LaterNumber

    happened = []

    class FakeEvent:
        def record(self, stream):
            happened.append(f"recorded on {stream}")

        def synchronize(self):
            happened.append("waited")
            value.fill_(2.5)  # only now it is computed

    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the stream of {device}")
    value = torch.tensor(0.0)
    number = LaterNumber(value)
    assert happened == ["recorded on the stream of cpu"]
    assert float(number) == 2.5 and happened[1:] == ["waited"]


@on_ranks("torch", n=1)
def test_no_device_goes_on_before_the_exchange_has_begun(hk, monkeypatch):
    """Autograd has a thread for each device: the second one must not meet what the last backward left."""
    import threading
    import types

    import torch

    from hvdkit.torch import backward, private

    entered, second = threading.Event(), threading.Event()
    order = []

    class SlowExchange:
        def begin(self):
            entered.set()
            second.wait(0.5)  # as long as the other may need to overtake it
            order.append("begun")

    tracker, exchange = backward.BackwardTracker(), SlowExchange()
    monkeypatch.setattr(private, "current_graph_task", lambda: 7)
    monkeypatch.setattr(private, "at_the_end_of_backward", order.append)
    on_gpu = types.SimpleNamespace(device=torch.device("cuda", 0))
    first = threading.Thread(target=tracker.mark_ready, args=(exchange, on_gpu))
    first.start()
    assert entered.wait(60)
    tracker.mark_ready(exchange, on_gpu)
    second.set()
    order.append("went on")
    first.join()
    assert order[1:] == ["begun", "went on"]
