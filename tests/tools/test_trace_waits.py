"""The names that hk.profile gives to the waits for Horovod, with stand-ins for Horovod: no rank, no build."""

import sys
from types import ModuleType

import pytest

from hvdkit.observe.torch_profile import profile
from hvdkit.read.trace import summarize


@pytest.fixture
def torch():
    return pytest.importorskip("torch", reason="`make test` installs it")


@pytest.fixture
def horovod(monkeypatch, torch):
    """Modules as Horovod's, each with its name for ``synchronize``, and an optimizer as its distributed ones."""
    modules = {name: ModuleType(name) for name in ("horovod.torch", "horovod.torch.mpi_ops", "horovod.torch.optimizer")}
    for module in modules.values():
        module.synchronize = lambda handle: handle + 1
    modules["horovod.torch"].is_initialized = lambda: True
    modules["horovod.torch"].rank = lambda: 1
    modules["horovod.torch"].size = lambda: 3
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    return modules


def distributed(torch):
    """A class of optimizers as Horovod's."""

    class Distributed(torch.optim.SGD):
        def synchronize(self):
            self.synchronized = getattr(self, "synchronized", 0) + 1

        def step(self, closure=None):
            self.synchronize()
            return super().step(closure)

    Distributed.__module__ = "horovod.torch.optimizer"
    return Distributed


def train(directory, torch, horovod, steps=4):
    model = torch.nn.Linear(4, 2)
    optimizer = distributed(torch)(model.parameters(), lr=0.1)
    loader = torch.utils.data.DataLoader(torch.ones(8 * steps, 4), batch_size=8)
    with profile(directory, wait=1, warmup=1, active=2) as steps_done:
        for batch in loader:
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
            assert horovod["horovod.torch"].synchronize(3) == 4
            assert horovod["horovod.torch.mpi_ops"].synchronize(3) == 4
            steps_done.step()
    return optimizer


def test_waits_and_data_loading_have_names_in_the_trace(tmp_path, torch, horovod):
    before = {name: module.synchronize for name, module in horovod.items()}
    optimizer = train(tmp_path, torch, horovod)
    (found,) = summarize([tmp_path]).ranks
    assert (found.rank, found.size, len(found.steps)) == (1, 3, 2)
    calls = {one.name: one.calls for one in found.operators if one.kind == "communication"}
    assert calls == {"hvdkit:allreduce_wait": 2, "hvdkit:collective_wait": 4}
    assert all(step.data > 0 and step.exposed > 0 and step.computation > 0 for step in found.steps)
    assert optimizer.synchronized == 4, "the wait itself is the optimizer's own, once a step"
    assert {name: module.synchronize for name, module in horovod.items()} == before, "nothing is left behind"
    assert "synchronize" not in vars(optimizer)


def test_an_error_of_the_training_leaves_nothing_behind(tmp_path, horovod):
    before = {name: module.synchronize for name, module in horovod.items()}
    with pytest.raises(ZeroDivisionError), profile(tmp_path, wait=0, warmup=0, active=1):
        _ = 1 / 0
    assert {name: module.synchronize for name, module in horovod.items()} == before
