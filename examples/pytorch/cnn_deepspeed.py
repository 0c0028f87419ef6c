"""Train a CNN on handwritten digits with DeepSpeed (ZeRO 0, 1 or 2) on N processes, under any launcher."""

import copyreg
import json
import math
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import hvdkit.torch as hk
from hvdkit import datasets, flags
from hvdkit.errors import CheckpointError, DataError, MissingFrameworkError


class Net(nn.Module):
    def __init__(self, height, width, channels, classes):
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(channels, 32, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(
            nn.Linear(64 * (height // 2) * (width // 2), 128), nn.ReLU(), nn.Dropout(0.25), nn.Linear(128, classes)
        )

    def forward(self, x):
        return self.classifier(self.features(x))


def tensors(x, y):
    """Images (n, height, width, channels) as PyTorch wants them, (n, channels, height, width), and their labels."""
    return torch.utils.data.TensorDataset(torch.from_numpy(x).permute(0, 3, 1, 2).contiguous(), torch.from_numpy(y))


def settings(args):
    """DeepSpeed's configuration: the file, and the flags, which count more: batch, rate, warmup and ZeRO are theirs."""
    try:
        chosen = json.loads(Path(args.deepspeed_config).read_text(encoding="utf-8"))
        chosen = {**chosen, "zero_optimization": dict(chosen.get("zero_optimization", {}))}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise DataError(f"--deepspeed_config {args.deepspeed_config} is no readable JSON object: {error}.") from None
    for name in ("train_batch_size", "optimizer", "scheduler"):
        chosen.pop(name, None)
    check_number(args, chosen, "gradient_clipping", 0)
    check_number(args, chosen, "steps_per_print", 1)
    chosen.setdefault("zero_allow_untested_optimizer", True)  # as DeepSpeed calls every SGD
    chosen["train_micro_batch_size_per_gpu"] = args.batch_size
    chosen["zero_optimization"]["stage"] = args.zero_stage
    if args.fp16_allreduce:
        chosen["communication_data_type"] = "fp16"
    return chosen


def check_number(args, chosen, name, least):
    """Refuse what DeepSpeed takes without a look and fails with in the first step."""
    value = chosen.get(name, least)
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < math.inf:
        raise DataError(
            f"--deepspeed_config {args.deepspeed_config}: {name} must be a number from {least} on, got {value!r}."
        )


def import_deepspeed(world, device):
    """DeepSpeed, told of the accelerator and of this rank's place by the variables that it reads when imported."""
    os.environ["DS_ACCELERATOR"] = device.type
    os.environ.update(RANK=str(world.rank), WORLD_SIZE=str(world.size), LOCAL_RANK=str(world.local_rank))
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"  # of its checkpoints: nothing in them is run
    os.environ.setdefault("DS_LOG_LEVEL", "warning")
    try:
        import deepspeed
        from deepspeed.runtime.fp16.loss_scaler import LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address
    except ImportError as error:
        raise MissingFrameworkError(
            f"this example needs DeepSpeed, which cannot be imported ({error}); run `pip install 'hvdkit[deepspeed]'`."
        ) from None
    # A C++ extension for inference on CPUs, which it would compile here at the start of every new installation.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.serialization.add_safe_globals([LossScaler, ZeroStageEnum, fragment_address])
    copyreg.pickle(ZeroStageEnum, lambda stage: (ZeroStageEnum, (stage.value,)))  # Python 3.11.2 would write getattr
    return deepspeed


def words_of(error):
    """An error of DeepSpeed, which may have several lines or none, in one."""
    return " ".join(str(error).split()) or type(error).__name__


def restore(model, args, world):
    """What was saved beside the newest checkpoint, None where there is none; the model and its optimizer get theirs.

    Raises:
        CheckpointError: there is one, of another number of processes or stage of ZeRO, or a damaged one.
    """
    here = f"with -n {world.size} and --zero_stage {args.zero_stage}"
    said = f"the checkpoint in {args.checkpoint_dir} cannot be loaded {here}"
    fix = "give those that it was saved with, or another --checkpoint_dir"
    try:
        path, saved = model.load_checkpoint(args.checkpoint_dir)
    except Exception as error:  # whatever fails in DeepSpeed when the files are not what it expects
        raise CheckpointError(f"{said} ({words_of(error)}); {fix}.") from error
    if path is None:
        return None
    if saved.get("zero_stage") != args.zero_stage:  # DeepSpeed may leave the optimizer's state out without an error
        raise CheckpointError(f"{said}: it was saved with {saved.get('zero_stage', 'another program')}; {fix}.")
    return saved


def save(model, args, loader):
    """Write a checkpoint; a collective."""
    try:
        state = {"loader": loader.state(), "zero_stage": args.zero_stage}
        model.save_checkpoint(args.checkpoint_dir, client_state=state)
    except OSError as error:
        raise CheckpointError(
            f"cannot write to --checkpoint_dir {args.checkpoint_dir} ({error.strerror}); free some space or give a "
            "directory that can be written."
        ) from error


def main(args):
    world = hk.init_process_group("gloo" if args.device == "cpu" else None)
    device = hk.pin_device(world, args.device, args.num_threads)
    deepspeed = import_deepspeed(world, device)
    torch.manual_seed(args.seed)

    data = datasets.load(args.data, directory=args.data_dir, download=args.download, seed=args.seed)
    train_set, test_set = tensors(data.x_train, data.y_train), tensors(data.x_test, data.y_test)
    net = Net(*data.x_train.shape[1:], data.classes).to(device)
    loss_of = nn.CrossEntropyLoss()

    optimizer = torch.optim.SGD(net.parameters(), lr=hk.scale_lr(args.lr, world), momentum=0.9)
    configuration = settings(args)
    refusals = (deepspeed.DeepSpeedConfigError, deepspeed.runtime.zero.utils.ZeRORuntimeException)
    try:
        model, *_ = deepspeed.initialize(model=net, optimizer=optimizer, config=configuration)
    except (AssertionError, ImportError, TypeError, ValueError, *refusals) as error:
        raise DataError(f"DeepSpeed refuses --deepspeed_config {args.deepspeed_config}: {words_of(error)}") from error
    dtype = next(model.parameters()).dtype  # the file may ask for half precision
    loader = hk.shard(train_set, world, args.batch_size, seed=args.seed)
    test_loader = hk.shard(test_set, world, args.batch_size, remainder="exact", shuffle=False)
    steps = hk.steps_per_epoch(len(train_set), args.batch_size, world)
    schedule = hk.warmup(optimizer, world, steps, args.warmup_epochs)

    saved = restore(model, args, world) if args.resume else None
    if saved is not None:
        loader.load_state(saved["loader"])
        schedule.go_to(loader.epoch * steps)
    first_epoch = loader.epoch

    start = time.perf_counter()
    for epoch in range(first_epoch, args.epochs):
        model.train()
        for step, (x, y) in enumerate(loader, start=1):
            loss = loss_of(model(x.to(device, dtype)), y.to(device))
            model.backward(loss)
            model.step()
            schedule.step()
            if step % args.log_interval == 0 and world.is_root:
                print(f"epoch {epoch + 1}/{args.epochs} step {step}/{steps} loss {loss.item():.4f}")
        if args.checkpoint_dir:
            save(model, args, loader)
    seconds = time.perf_counter() - start

    model.eval()
    counts = torch.zeros(2, device=device)
    with torch.no_grad():
        for x, y, w in test_loader:
            hits = model(x.to(device, dtype)).argmax(dim=1) == y.to(device)
            counts += torch.stack([hits[w > 0].sum(), (w > 0).sum()])
    dist.all_reduce(counts)

    if world.is_root:
        images = (args.epochs - first_epoch) * steps * world.size * args.batch_size
        print(f"Training: {images / seconds:.0f} images/s")
        print(f"Test accuracy: {100 * counts[0] / counts[1]:.2f} %")
        print(f"Hvd Procs {world.size} Total time: {seconds} second")
    dist.destroy_process_group()


def add_flags(add):
    add(
        "--zero_stage",
        "--zero-stage",
        type=int,
        choices=(0, 1, 2),
        default=1,
        help="what is shared out over the processes: nothing, the optimizer's state (1), and the gradients (2)",
    )
    file = Path(__file__).with_name("ds_config.json")
    add("--deepspeed_config", "--deepspeed-config", default=file, help="DeepSpeed's other settings, a JSON file")


if __name__ == "__main__":
    flags.run(main, __doc__, add=add_flags)
