"""The tables: which packages are known, and what each function of Horovod, hvdkit and PyTorch is for."""

from __future__ import annotations

import re
import sys
from enum import Enum
from functools import cache

from hvdkit.steps.launchers import LAUNCHERS

Role = Enum(
    "Role",
    "INIT RANK LOCAL_RANK SPAWNED SIZE LOCAL_SIZE PIN SCALE WARMUP DISTRIBUTE BROADCAST BROADCAST_CALLBACK REDUCE "
    "COLLECTIVE BARRIER AVERAGE_CALLBACK CHECKPOINTS CHECKPOINT_CALLBACK SHARD STEPS FIT ELASTIC LOAD_MODEL",
)
"""What a function does for the eight steps.

SPAWNED is the number of a process that mp.spawn made: rank and local rank on one machine.
"""

RANKS = (Role.RANK, Role.LOCAL_RANK, Role.SPAWNED)
NUMBERS = (Role.RANK, Role.LOCAL_RANK, Role.SIZE, Role.LOCAL_SIZE)
TOGETHER = (Role.BROADCAST, Role.REDUCE, Role.COLLECTIVE, Role.BARRIER)
"""Calls that all ranks make together."""

_MESSAGES = {
    Role.RANK: r"(get_|cross_)?rank(_op)?",
    Role.LOCAL_RANK: r"(get_node_)?local_rank(_op)?",
    Role.SIZE: r"(get_|get_world_)?size(_op)?",
    Role.LOCAL_SIZE: r"(local|cross)_size(_op)?",
    Role.BARRIER: r"(monitored_)?barrier",
    Role.REDUCE: r"(grouped_|sparse_)?(all_?)?(reduce|gather)(_?scatter|_coalesced|_object|_into_tensor)?(_async)?_?",
    Role.COLLECTIVE: r"(broadcast(_async|_object|_object_list)?|bcast|scatter(_object_list)?|all_?to_?all)",
}
"""Functions that go by the same names in Horovod, torch.distributed and mpi4py."""
_OF = {
    "horovod": {
        Role.INIT: r"init",
        Role.DISTRIBUTE: r"(Partial)?Distributed(Adasum)?(Optimizer|GradientTape|Trainer)",
        Role.LOAD_MODEL: r"load_model",
        Role.BROADCAST: r"broadcast_(parameters|optimizer_state|(global_)?variables|(async_)?)",
        Role.BROADCAST_CALLBACK: r"BroadcastGlobalVariables(Callback|Hook)",
        Role.AVERAGE_CALLBACK: r"MetricAverageCallback",
        Role.WARMUP: r"LearningRate(Warmup|Schedule)Callback",
        Role.ELASTIC: r"(Torch|TensorFlow|TensorFlowKeras|Keras)State",
        Role.SHARD: r"ElasticSampler",
        **_MESSAGES,
    },
    "hvdkit.steps": {Role.SCALE: r"scale_lr", Role.STEPS: r"steps_per_epoch", Role.SHARD: r"Shard"},
    "hvdkit": {
        Role.INIT: r"init(_process_group)?",
        Role.PIN: r"pin_device",
        Role.SCALE: r"scale_lr",
        Role.WARMUP: r"[wW]armup|LearningRateSchedule",
        Role.DISTRIBUTE: r"distribute",
        Role.BROADCAST: r"broadcast_state",
        Role.BROADCAST_CALLBACK: r"BroadcastState",
        Role.CHECKPOINTS: r"Checkpoints",
        Role.CHECKPOINT_CALLBACK: r"Checkpoint",
        Role.SHARD: r"shard",
        Role.STEPS: r"steps_per_epoch",
        Role.REDUCE: r"average_metrics",
        Role.AVERAGE_CALLBACK: r"AverageMetrics",
        Role.COLLECTIVE: r"check_agreement",
        Role.FIT: r"fit",
    },
    "torch.distributed": {Role.INIT: r"init_process_group", Role.BROADCAST: r"broadcast", **_MESSAGES},
    "mpi4py": {one: f"(?i:{names})" for one, names in _MESSAGES.items()},
}

VARIABLES = {
    Role.RANK: {"PMIX_RANK", *(name for row in LAUNCHERS for name in row.rank)},
    Role.LOCAL_RANK: {name for row in LAUNCHERS for name in row.local_rank},
    Role.SIZE: {"SLURM_NPROCS", "PALS_SIZE", *(name for row in LAUNCHERS for name in row.size)},
}
"""What launchers call them in the environment."""

STARTS_DDP = "hvdkit.torch.init_process_group"
"""hvdkit's start of PyTorch's own DDP: what is distributed is DDP's, the other steps may still be hvdkit's."""

MODULES = re.compile(r"(horovod\.(torch|tensorflow\.keras|tensorflow|keras)|hvdkit\.(torch|tensorflow|keras|arrays))\b")
"""The modules of a library that a script can work with."""

RANK_WORDS = re.compile(
    r"(^|_)(rank|rank0|rank_?zero|is_root|is_main|is_master|is_chief|is_leader|is_primary|is_coordinator|master|chief|leader|main_process|"
    r"master_process|main_proc|procid|proc_id|process_id|process_index|worker_index|worker_id|task_index|gpu|gpu_id|"
    r"device_id|local_process_index|zero_only|zero_first|main_only|master_only|root_only)($|_|\d)"
)
"""Names that speak of one rank among many; what hangs on such a name is not said to happen on every rank."""

SIZE_WORDS = re.compile(
    r"(^|_)(world_size|worldsize|num_replicas|n_?gpus?|num_gpus?|ngpus|n_?ranks|num_ranks|n_?procs?|num_procs?|"
    r"num_processes|n_?processes|comm_size|hvd_size|n_?workers_total|replicas)($|_)"
)

DDP = re.compile(r"(torch\.nn\.parallel|apex\.parallel)\.(distributed\.)?DistributedDataParallel")
SAMPLERS = {"torch.utils.data.distributed.DistributedSampler", "torch.utils.data.DistributedSampler"}
LOADERS = {
    f"{module}.DataLoader"
    for module in ("torch.utils.data", "torch.utils.data.dataloader", "torch_geometric.loader", "torch_geometric.data")
}
KEPT_AS_IT_IS = {
    "torch.compile", "torch.jit.script", "torch.nn.SyncBatchNorm.convert_sync_batchnorm", "torch.nn.DataParallel",
    "torch.nn.parallel.DataParallel", "copy.copy", "copy.deepcopy", "functools.partial", "tensorflow.function",
    "itertools.cycle", "itertools.islice", "itertools.chain", "tqdm.tqdm", "tqdm.auto.tqdm", "tqdm.notebook.tqdm",
    "tqdm.trange", "numpy.int32", "numpy.int64", "numpy.float32", "os.path.join", "pathlib.Path", "math.ceil",
    "math.floor", "math.sqrt", "numpy.ceil", "numpy.sqrt", "torch.tensor", "tensorflow.constant",
    "tensorflow.cast",
}  # fmt: skip
"""Functions whose result is their argument in another dress."""


_PACKAGES = {
    "PIL", "absl", "albumentations", "apex", "click", "cv2", "cloudpickle", "colorama", "einops", "filelock", "flax",
    "gdown", "h5py", "horovod", "hvdkit", "hydra", "imageio", "jax", "joblib", "keras", "keras_cv", "keras_nlp",
    "kornia", "matplotlib", "medmnist", "ml_collections", "mlflow", "mlx", "mpi4py", "mxnet", "natsort", "neptune",
    "netCDF4", "numba", "numpy", "nvidia", "omegaconf", "optax", "packaging", "pandas", "petastorm", "prettytable",
    "psutil", "pyarrow", "pydantic", "pynvml", "ray", "requests", "rich", "scipy", "seaborn", "sentencepiece", "six",
    "skimage", "sklearn", "submitit", "tabulate", "tensorboard", "tensorboardX", "tensorflow", "tensorflow_addons",
    "tensorflow_datasets", "tensorflow_hub", "tensorflow_io", "tensorflow_probability", "termcolor", "tf_keras",
    "tiktoken", "timm", "tokenizers", "toml", "torch", "torch_geometric", "torch_optimizer", "torchaudio",
    "torchinfo", "torchmetrics", "torchsummary", "torchtext", "torchvision", "tqdm", "typer", "wandb", "webdataset",
    "wget", "xarray", "yaml", "zarr",
}  # fmt: skip
_ALSO_NAMES_OF_SCRIPTS = {"code", "profile", "test", "trace"}
KNOWN_PACKAGES = (_PACKAGES | sys.stdlib_module_names) - _ALSO_NAMES_OF_SCRIPTS
"""Packages whose functions do what their names say; whatever comes from another one may do any of the steps."""

OTHER_DISTRIBUTORS = {
    "accelerate": "Accelerate", "bagua": "Bagua", "byteps": "BytePS", "colossalai": "Colossal-AI",
    "composer": "Composer", "deepspeed": "DeepSpeed", "fairscale": "FairScale", "lightning": "Lightning",
    "pytorch_lightning": "Lightning", "smdistributed": "SageMaker's data parallel library",
    "transformers": "Transformers",
}  # fmt: skip
"""Packages that distribute a training in their own ways, which are not checked."""

OTHER_WAYS = {
    r"tensorflow\.distribute\..*Strategy": "tf.distribute",
    r"torch\.distributed\.rpc.*": "torch.distributed.rpc",
    r".*FullyShardedDataParallel.*|.*fully_shard": "FSDP",
    r"horovod\.(spark|ray)\b.*": "Horovod on Spark or Ray",
}
"""What does so in TensorFlow, PyTorch and Horovod."""

_SAME = (
    ("tensorflow.compat.v2.", "tensorflow."),
    ("tensorflow.python.keras.", "keras."),
    ("tensorflow.keras.", "keras."),
    ("tf_keras.", "keras."),
    ("tensorflow.optimizers.", "keras.optimizers."),
    ("keras.src.", "keras."),
    ("keras.api.", "keras."),
    ("tensorflow.losses.", "keras.losses."),
    ("tensorflow.metrics.", "keras.metrics."),
)


def canonical(name: str | None) -> str | None:
    """The name that a thing has under all the names that lead to it."""
    for prefix, short in _SAME if name else ():
        if f"{name}.".startswith(prefix):
            return f"{name}.".replace(prefix, short, 1)[:-1]
    return name


@cache
def role(name: str | None) -> Role | None:
    """What a function is for, by its full name; None for every function that none of the eight steps needs."""
    if name is None or "." not in name:
        return None
    if DDP.fullmatch(name):
        return Role.DISTRIBUTE
    if name.startswith("horovod.") and name.endswith("elastic.run"):
        return Role.ELASTIC
    known = next((package for package in _OF if name.startswith(f"{package}.")), "")
    if known == "hvdkit" and not MODULES.match(name):
        return None
    last = name.rpartition(".")[2]
    return next((one for one, names in _OF.get(known, {}).items() if re.fullmatch(names, last)), None)


def library_of(name: str) -> str | None:
    """The library that a full name belongs to: "horovod", "hvdkit", "ddp", or None."""
    root = name.partition(".")[0]
    if root == "horovod" or (root == "hvdkit" and MODULES.match(name)):
        return root
    is_ddp = DDP.fullmatch(name) or (name.startswith("torch.distributed.") and role(name) is not None)
    return "ddp" if is_ddp else None
