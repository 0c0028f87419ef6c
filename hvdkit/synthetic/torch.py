"""``hvdkit bench synthetic --framework torch``: one rank of it, started by that command."""

from __future__ import annotations

import itertools
from typing import Any

from hvdkit.synthetic.benchmark import BenchmarkSettings, Stopwatch, run_program


def run(settings: BenchmarkSettings) -> tuple[Any, Any]:
    """Train on one random batch and print how fast that is.

    Returns:
        The model and its optimizer, trained.
    Raises:
        MissingFrameworkError: PyTorch, or Horovod for it, is missing.
        InvalidArgumentError: Adasum over a number of ranks that is no power of two.
    """
    import hvdkit.torch as hk  # says what is missing, where ``import torch`` would only fail

    world = hk.init()
    settings.require_ranks(world.size)
    import torch

    from hvdkit.synthetic.torch_models import make_model

    device = hk.pin_device(world, "auto" if settings.cuda else "cpu")
    torch.backends.cudnn.benchmark = True
    model = make_model(settings).to(device).train()
    rate = hk.scale_lr(0.01, world, settings.rule)
    plain = torch.optim.SGD(model.parameters(), lr=rate)
    optimizer = hk.distribute(plain, model, op=settings.op, compression=settings.compression)
    hk.broadcast_state(model, optimizer)

    x, y = (torch.from_numpy(array).to(device) for array in settings.data(world.rank))
    if x.dim() == 4:
        x = x.permute(0, 3, 1, 2).contiguous()
    loss_of = torch.nn.CrossEntropyLoss()
    sizes = [parameter.numel() for parameter in model.parameters()]
    on_gpu = device.type == "cuda"
    watch = Stopwatch(settings, world, "GPU" if on_gpu else "CPU", len(sizes), sum(sizes))
    watch.begin()
    for images, labels in hk.record_steps(itertools.repeat((x, y), settings.batches)):
        optimizer.zero_grad()
        loss_of(model(images), labels).backward()
        optimizer.step()
        watch.batch_ended(torch.cuda.synchronize if on_gpu else lambda: None)
    watch.end()
    return model, optimizer


if __name__ == "__main__":
    run_program(run)
