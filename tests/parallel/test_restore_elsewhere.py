"""Checkpoints that are read elsewhere: without a job, in part, wrapped, by models of another type; and forged ones."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from programs_checks import message
from ranks import on_ranks

import hvdkit
from hvdkit.steps import manifest

WITHOUT_A_JOB = """
import importlib, json, shutil, sys
import numpy as np
hk = importlib.import_module(sys.argv[1])
store = hk.Checkpoints(sys.argv[2])
adapter = sys.argv[1].rpartition(".")[2]
if adapter == "torch":
    import torch
    model = torch.nn.Linear(3, 2)
    saved = store.restore(model)
    weights = [one.tolist() for one in model.parameters()]
    shutil.copytree(sys.argv[2], f"{sys.argv[2]}/copy", ignore=lambda *_: ["copy"])
    hk.Checkpoints(f"{sys.argv[2]}/copy").restore(model, torch.optim.SGD(model.parameters(), lr=0.1))
elif adapter == "arrays":
    state, saved = store.restore({"w": np.zeros((3, 2))})
    weights = [state["w"].tolist()]
else:
    import keras
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    saved = store.restore(model)
    weights = [np.asarray(one).tolist() for one in model.get_weights()]
print(json.dumps({"weights": weights, "step": saved.step, "latest": store.latest().step, "best": store.best().step}))
"""


def without_a_job(hk: Any, directory: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "OMPI_", "PMIX_"))}
    command = [sys.executable, "-c", WITHOUT_A_JOB, hk.__name__, str(directory)]
    return subprocess.run(command, env={**plain, **variables}, capture_output=True, text=True, check=False)


@on_ranks("torch", "tensorflow", "keras", "arrays", n=2, mpi=[("arrays", 2)])
def test_a_checkpoint_is_restored_without_a_job(hk, world, everyone, tmp_path):
    import numpy as np

    store = hk.Checkpoints(tmp_path, keep_best=1)
    if hk.__name__ == "hvdkit.torch":
        import torch

        model = torch.nn.Linear(3, 2)
        state: tuple[Any, ...] = model, torch.optim.SGD(model.parameters(), lr=0.1)
        weights = [one.tolist() for one in model.parameters()]
    elif hk.__name__ == "hvdkit.arrays":
        state = ({"w": np.arange(6.0).reshape(3, 2)},)
        weights = [state[0]["w"].tolist()]
    else:
        import keras

        state = (keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)]),)
        weights = [np.asarray(one).tolist() for one in state[0].get_weights()]
    for step, score in ((1, 0.9), (2, 0.1)):
        store.save(*state, step=step, score=score)
    assert everyone((store.latest().step, store.best().step)) == [(2, 1)] * 2
    if world.is_root:
        found = without_a_job(hk, tmp_path)
        assert found.returncode == 0, found.stderr
        assert json.loads(found.stdout) == {"weights": weights, "step": 2, "latest": 2, "best": 1}
        if hk.__name__ == "hvdkit.arrays":
            refused = without_a_job(hk, tmp_path, OMPI_COMM_WORLD_RANK="1", OMPI_COMM_WORLD_SIZE="2")
            assert "started this process as rank 1" in refused.stderr and "call init() before" in refused.stderr
    everyone("read")


def base(seed: int, head: int = 2) -> Any:
    import torch

    torch.manual_seed(seed)
    return torch.nn.ModuleDict(
        {"body": torch.nn.Linear(3, 4), "norm": torch.nn.BatchNorm1d(4), "head": torch.nn.Linear(4, head)}
    )


def numbers(model: Any) -> dict[str, list[Any]]:
    return {name.replace("module.", ""): one.tolist() for name, one in model.state_dict().items()}


@on_ranks("torch", n=2)
def test_a_part_of_a_model_is_restored_and_the_rest_named(hk, world, everyone, tmp_path):
    import torch

    store, whole = hk.Checkpoints(tmp_path / "whole"), base(1)
    store.save(whole, step=1)
    model = base(2 + world.rank, head=5)
    model["more"] = torch.nn.Linear(1, 1)
    before = numbers(model)
    told = message(lambda: store.restore(model))
    assert "head.bias is (2,), not (5,)" in told and "it lacks more.bias" in told and "strict=False" in told
    assert numbers(model) == before
    saved = store.restore(model, strict=False)
    assert saved.missing == ("head.bias", "head.weight", "more.bias", "more.weight")
    assert saved.unexpected == ("head.bias", "head.weight")
    assert {name: numbers(model)[name] for name in ("body.weight", "norm.bias")} == {
        name: numbers(whole)[name] for name in ("body.weight", "norm.bias")
    }
    assert len({json.dumps(one) for one in everyone(numbers(model))}) == 1  # also what was not in the checkpoint
    assert "no name and shape is in both" in message(lambda: store.restore(torch.nn.Linear(7, 7), strict=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert "leave the optimizer out" in message(lambda: store.restore(model, optimizer, strict=False))


@pytest.mark.parametrize("asynchronous", [False, True])
@on_ranks("torch", n=2)
def test_only_what_trains_is_saved_and_restored(hk, world, tmp_path, asynchronous):
    import torch

    def tuned(seed: int) -> tuple[Any, Any]:
        model = base(seed)
        model["body"].requires_grad_(False)
        return model, torch.optim.Adam([one for one in model.parameters() if one.requires_grad], lr=0.1)

    model, optimizer = tuned(1)
    for one in model["head"].parameters():
        one.grad = torch.ones_like(one)
    optimizer.step()
    model["norm"].running_mean += 1
    store = hk.Checkpoints(tmp_path / "part", asynchronous=asynchronous)
    store.save(model, optimizer, step=1, trainable_only=True)
    store.wait()
    path = store.latest().path
    held = torch.load(path / "model.pt", weights_only=True)
    assert not any(name.startswith("body") for name in held) and "norm.running_mean" in held and "head.weight" in held
    other, slots = tuned(5)
    body = numbers(other)["body.weight"]
    assert "restore(trainable_only=True) leaves the rest" in message(lambda: store.restore(other, slots))
    store.restore(other, slots, trainable_only=True)
    expected = {**numbers(model), "body.weight": body, "body.bias": numbers(other)["body.bias"]}
    assert numbers(other) == expected and len(slots.state) == 2
    complete = hk.Checkpoints(tmp_path / "whole")
    complete.save(base(3), step=1)
    complete.restore(other, trainable_only=True)
    assert numbers(other)["body.weight"] == body and numbers(other)["head.weight"] == numbers(base(3))["head.weight"]


@on_ranks("torch", n=2)
def test_a_wrapped_models_checkpoint_is_a_plain_ones(hk, world, everyone, tmp_path):
    import torch

    def wrapped(model: Any, how: str) -> Any:
        if "DDP" in how:
            model = torch.nn.DataParallel(model)
        return torch.compile(model, backend="eager") if "compiled" in how else model

    for number, (one, other) in enumerate([("DDP", ""), ("", "DDP"), ("DDP compiled", ""), ("", "compiled DDP")]):
        store = hk.Checkpoints(tmp_path / f"{number}")
        store.save(wrapped(base(1), one), step=1)
        target = base(2)
        store.restore(wrapped(target, other))
        assert numbers(target) == numbers(base(1))
        file = store.latest().path / "model.pt"
        held = torch.load(file, weights_only=True)
        assert list(held) == list(base(1).state_dict()) and held._metadata == base(1).state_dict()._metadata
        everyone("read")
        if world.is_root and number == 0:  # as a version wrote that did not know wrappers
            torch.save(torch.nn.DataParallel(base(4)).state_dict(), file)
            seal(file)
    store = hk.Checkpoints(tmp_path / "0")
    store.restore(target)
    assert numbers(target) == numbers(base(4))


def seal(file: Path) -> None:
    """Have a changed file in its checkpoint's manifest."""
    written = file.parent / manifest.MANIFEST
    found = json.loads(written.read_text())
    written.unlink()
    manifest.seal(file.parent, found["step"], found["metadata"], found["score"])


@on_ranks("torch", n=2)
def test_another_type_and_a_schedule_of_others_are_named(hk, world, everyone, tmp_path):
    import torch

    store, model = hk.Checkpoints(tmp_path), base(1)
    store.save(model, step=1)
    half = base(2).to(torch.bfloat16)
    before = numbers(half)
    for strict in (True, False):
        told = message(lambda strict=strict: store.restore(half, strict=strict))
        assert "body.weight is float32, the model has bfloat16; restore into a model of float32" in told
    assert numbers(half) == before
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.zeros(8, 3))
    loader, warmup = hk.shard(data, world, 2), hk.warmup(optimizer, world, 2)
    assert store.save(model, optimizer, step=2, loader=loader, schedule=[warmup]).step == 2
    store.restore(model, optimizer, loader=loader, schedule=[warmup])
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    for schedule, told in ((cosine, "got CosineAnnealingLR"), ([warmup, cosine], "got CosineAnnealingLR")):
        said = message(lambda schedule=schedule: store.save(model, step=3, loader=loader, schedule=schedule))
        assert told in said and "extra={'schedule'" in said
    assert "got Warmup without loader=" in message(lambda: store.save(model, step=3, schedule=warmup))
    everyone("saved")
    assert store.latest().step == 2


@pytest.mark.parametrize("how", ["compressed", "claims more", "no archive"])
@on_ranks("torch", n=2)
def test_a_file_that_unpacks_to_more_than_it_says_is_refused(hk, world, everyone, tmp_path, how):

    store = hk.Checkpoints(tmp_path)
    store.save(base(1), step=1)
    file = store.latest().path / "model.pt"
    everyone("found")
    if world.is_root:
        packed = file.with_name("packed.pt")
        with zipfile.ZipFile(file) as read, zipfile.ZipFile(packed, "w") as written:
            for record in read.infolist():
                kind = zipfile.ZIP_DEFLATED if how == "compressed" else zipfile.ZIP_STORED
                written.writestr(record.filename, read.read(record), kind)
            if how == "compressed":
                written.writestr("archive/data/more", bytes(10**7), zipfile.ZIP_DEFLATED)
        raw = bytearray(packed.read_bytes())
        if how == "claims more":
            first = raw.index(b"PK\1\2")  # the sizes of the first record, in the central directory
            raw[first + 20 : first + 28] = (2**31).to_bytes(4, "little") * 2
        packed.unlink()
        file.write_bytes(raw if how != "no archive" else bytes(1000))
        seal(file)
    everyone("forged")
    told = {"compressed": "is compressed", "claims more": "claim more", "no archive": "cannot be read"}[how]
    said = message(lambda: store.restore(base(2)))
    assert told in said and "model.pt" in said, said


@pytest.mark.filterwarnings("ignore")
@on_ranks("torch", n=2)
def test_an_optimizer_whose_state_is_of_a_tensor_subclass(hk, world, everyone, tmp_path):
    import torch

    optim = pytest.importorskip("torchao.optim")
    for number, kind in enumerate((optim.AdamW8bit, optim.AdamW4bit)):
        model = torch.nn.Linear(64, 128)
        optimizer = hk.distribute(kind(model.parameters(), 1e-2), model)
        hk.broadcast_state(model, optimizer)

        @torch.compiler.set_stance("force_eager")  # torchao compiles its steps, for a minute
        def train(model: Any = model, optimizer: Any = optimizer) -> None:
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(4, 64)).square().mean().backward()
                optimizer.step()

        train()
        hk.check_agreement(model, optimizer, world)
        store = hk.Checkpoints(tmp_path / f"{number}", asynchronous=bool(number))
        store.save(model, optimizer, step=2)
        store.wait()
        kept = codes(optimizer)
        assert kept and type(optimizer.state[model.weight]["exp_avg"]) is not torch.Tensor
        train()
        assert codes(optimizer) != kept
        store.restore(model, optimizer)
        assert codes(optimizer) == kept
        if world.rank == 1:
            optimizer.state[model.weight]["exp_avg"].codes.add_(1)
        with pytest.raises(hvdkit.AgreementError, match=r"exp_avg\.codes differs between rank 0 and rank 1"):
            hk.check_agreement(model, optimizer, world)
        hk.broadcast_state(model, optimizer)
        hk.check_agreement(model, optimizer, world)
        later = kind(model.parameters(), 1e-2)  # without state of its own yet
        later.load_state_dict(optimizer.state_dict() if world.is_root else later.state_dict())
        hk.broadcast_state(model, later)
        assert everyone(codes(later))[1] == kept
        assert type(later.state[model.weight]["exp_avg"]) is type(optimizer.state[model.weight]["exp_avg"])


def codes(optimizer: Any) -> Any:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [[one.codes.tolist(), one.scale.tolist()] for one in states if hasattr(one, "codes")]
