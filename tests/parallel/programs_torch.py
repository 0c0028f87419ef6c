"""What the ranks of tests/parallel/test_torch.py do; each function returns JSON values."""

import os
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn

import hvdkit
import hvdkit.torch as hk

SAMPLES, FEATURES, BATCH = 53, 6, 4  # 53 is no multiple of any n * BATCH


def make_data() -> torch.utils.data.TensorDataset:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(SAMPLES, FEATURES, generator=generator, dtype=torch.float64)
    y = (x.sum(dim=1) > 0).long() + (x[:, 0] > 1).long()
    return torch.utils.data.TensorDataset(x, y)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def weights(model: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]).tolist()


def topology() -> dict[str, Any]:
    world = hk.init()
    names = ("rank", "size", "local_rank", "local_size", "cross_rank", "cross_size", "launcher")
    return {name: getattr(world, name) for name in names}


def mismatched(variables: dict[str, str]) -> dict[str, str]:
    os.environ.update(variables)
    try:
        hk.init()
    except hvdkit.HvdkitError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "none"}


def broadcast_after_root_stepped() -> dict[str, Any]:
    """The root has an optimizer with slots, the others have none; Adam counts its steps in a 0-dimensional tensor."""
    world = hk.init()
    model = make_model(seed=world.rank)
    model.register_buffer("odd", torch.arange(3, dtype=torch.bfloat16) + world.rank)
    model.register_buffer("transposed", (torch.arange(6.0).reshape(2, 3) * (world.rank + 1)).T)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01 * (world.rank + 1))
    if world.is_root:
        model(torch.ones(2, FEATURES, dtype=torch.float64)).sum().backward()
        optimizer.step()
    optimizer = hk.distribute(optimizer, model)
    hk.broadcast_state(model, optimizer)
    hk.check_agreement(model, optimizer, world)
    slots = next(iter(optimizer.state.values()))
    return {
        "weights": weights(model),
        "odd": model.odd.float().tolist(),
        "transposed": model.transposed.tolist(),
        "lr": optimizer.param_groups[0]["lr"],
        "step": float(slots["step"]),
        "exp_avg": slots["exp_avg"].reshape(-1).tolist(),
    }


def broadcast_leaves_fresh_optimizer_alone() -> dict[str, Any]:
    """Horovod's own broadcast_optimizer_state steps with zero gradients, which decays the weights."""
    hk.init()
    model = make_model()
    before = weights(model)
    optimizer = hk.distribute(torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5), model)
    hk.broadcast_state(model, optimizer)
    return {"unchanged": weights(model) == before, "slots": len(optimizer.state)}


def broadcast_different_models() -> dict[str, str]:
    world = hk.init()
    model = nn.Linear(3, 3 + world.rank)
    try:
        hk.broadcast_state(model)
    except hvdkit.AgreementError as error:
        return {"message": str(error)}
    return {"message": ""}


def metrics() -> dict[str, Any]:
    world = hk.init()
    means = hk.average_metrics({"loss": float(world.rank), "accuracy": (world.rank * 10, 10 + 10 * world.rank)}, world)
    try:
        hk.average_metrics({f"loss{world.rank}": 1.0}, world)
    except hvdkit.AgreementError as error:
        return {"means": means, "message": str(error)}
    return {"means": means, "message": ""}


def checkpoints(directory: str) -> dict[str, Any]:
    """Save, train on, restore: every rank is back where it was."""
    world = hk.init()
    model = make_model()
    optimizer = hk.distribute(torch.optim.Adam(model.parameters(), lr=0.01), model)
    hk.broadcast_state(model, optimizer)

    def step() -> None:
        optimizer.zero_grad()
        model(torch.full((2, FEATURES), float(world.rank + 1), dtype=torch.float64)).pow(2).sum().backward()
        optimizer.step()

    store = hk.Checkpoints(directory, keep=2)
    nothing = store.restore(model, optimizer)
    step()
    saved = store.save(model, optimizer, step=1, epoch=1)
    kept = weights(model)
    step()
    after_two = weights(model)
    restored = store.restore(model, optimizer)
    back = weights(model)
    step()
    try:
        store.restore(nn.Linear(2, 2))
        other = ""
    except hvdkit.CheckpointError as error:
        other = str(error)
    return {
        "nothing": nothing is None,
        "writer": sorted(file.name for file in saved.path.iterdir()),
        "metadata": restored.metadata,
        "back": back == kept,
        "same_again": weights(model) == after_two,
        "other": other,
    }


def unwritable_checkpoint(directory: str) -> dict[str, str]:
    hk.init()
    model = make_model()
    try:
        hk.Checkpoints(directory).save(model, step=1)
    except hvdkit.HvdkitError as error:
        return {"error": type(error).__name__, "message": str(error)}
    return {"error": "none"}


def gradients(variants: list[dict[str, Any]]) -> list[list[float]]:
    """For each set of options, the gradient that the optimizer applies after rank-dependent backward passes."""
    world = hk.init()
    updates = []
    for options in variants:
        model = nn.Linear(2, 1, bias=False)
        nn.init.zeros_(model.weight)
        optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, **options)
        for number in range(options.get("backward_passes_per_step", 1)):
            model(torch.tensor([[1.0 + world.rank, 10.0 * (number + 1)]])).sum().backward()
        optimizer.step()
        updates.append((-model.weight.detach()).reshape(-1).tolist())
    return updates


def buckets() -> dict[str, Any]:
    """What gradients in buckets do at the edges; each answer is a gradient or what was said."""
    world = hk.init()
    own = 1.0 + world.rank

    def make(**options: Any) -> tuple[nn.ModuleList, torch.optim.Optimizer]:
        model = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(3)])
        for layer in model:
            nn.init.zeros_(layer.weight)
        model[2].weight.requires_grad_(False)
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        return model, hk.distribute(optimizer, model, bucket_mb=1, **options)

    def updates(model: nn.ModuleList) -> list[float]:
        return [-weight for layer in model for weight in layer.weight.detach().reshape(-1).tolist()]

    ones, found = torch.ones(1, 2), {}
    model, optimizer = make()
    for trained in (True, world.is_root):
        optimizer.zero_grad()
        (model[0](own * ones) + (model[1](own * ones) if trained else 0)).sum().backward()
        optimizer.step()
    found["missing on a rank"] = updates(model)

    model, optimizer = make()
    for _ in range(2):
        optimizer.zero_grad()
        sum(layer(own * ones) for layer in model).sum().backward()
        for parameter in (one for one in model.parameters() if one.grad is not None):
            parameter.grad = parameter.grad.clone()  # as those do that replace gradients after backward
        model[0].weight.grad = model[0].weight.grad * 2
        optimizer.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with optimizer.skip_synchronize():
            optimizer.step()
    found["clipped"] = updates(model)

    model, optimizer = make()
    for _ in range(2):
        nn.Module.zero_grad(model, set_to_none=False)
        sum(layer(own * ones) for layer in model).sum().backward()
        optimizer.step()
    found["zeroed in place"] = updates(model)

    model, optimizer = make()
    model[0](own * ones).sum().backward()
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.zero_grad()
    (model[0](own * ones).sum() + model[1](own * ones).sum()).backward()
    optimizer.step()
    found["state loaded in mid-step"] = updates(model)

    table = nn.Embedding(4, 2, sparse=True)
    sparse = hk.distribute(torch.optim.SGD(table.parameters(), lr=1.0), table, bucket_mb=1)
    try:
        table(torch.tensor([1])).sum().backward()
        sparse.step()
    except hvdkit.InvalidArgumentError as error:
        found["sparse"] = str(error)
    for name, options in {"adasum": {"op": "adasum"}, "groups": {"groups": 1}, "size": {"bucket_mb": 0}}.items():
        model = make_model()
        try:
            hk.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, **{"bucket_mb": 1, **options})
        except hvdkit.InvalidArgumentError as error:
            found[name] = str(error)
    return found


def process_set_gradients() -> dict[str, Any]:
    """Ranks 0 and 1 average among themselves; rank 2 is alone."""
    pair = hvd.ProcessSet([0, 1])
    hvd.init(process_sets=[pair])
    world = hk.init()
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = hk.distribute(torch.optim.SGD(model.parameters(), lr=1.0), model, process_set=pair)
    model(torch.tensor([[2.0 + 2.0 * world.rank]])).sum().backward()
    optimizer.step()
    hvd.barrier()  # rank 2 has nothing to wait for, and its end would end the others' process set
    return {"update": -model.weight.item()}


def mistakes() -> dict[str, str]:
    hk.init()
    model = make_model()
    once = hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found = {}
    attempts = {
        "twice": lambda: hk.distribute(once, model),
        "other model": lambda: hk.distribute(torch.optim.SGD(model.parameters(), lr=0.1), make_model()),
        "unbuilt": lambda: hk.broadcast_state(nn.LazyLinear(3)),
        "root": lambda: hk.broadcast_state(model, root=9),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except hvdkit.InvalidArgumentError as error:
            found[name] = str(error)
    return found


def fit(batch_size: int, base_lr: float, epochs: int = 4, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    history = hk.fit(
        model,
        torch.optim.SGD,
        nn.CrossEntropyLoss(),
        make_data(),
        epochs=epochs,
        batch_size=batch_size,
        base_lr=base_lr,
        **options,
    )
    return {"history": history, "weights": weights(model)}
