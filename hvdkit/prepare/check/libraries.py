"""The tables: what each function of Horovod, hvdkit and PyTorch is for."""

from __future__ import annotations

import re

INIT = "init"
RANK = "rank"
LOCAL_RANK = "local_rank"
SPAWNED = "spawned"  # the number of a process that mp.spawn made: rank and local rank on one machine
SIZE = "size"
LOCAL_SIZE = "local_size"
PIN = "pin"
SCALE = "scale"
WARMUP = "warmup"
DISTRIBUTE = "distribute"
BROADCAST = "broadcast"
BROADCAST_CALLBACK = "broadcast callback"
REDUCE = "reduce"
COLLECTIVE = "collective"
BARRIER = "barrier"
AVERAGE_CALLBACK = "average callback"
CHECKPOINTS = "checkpoints"
CHECKPOINT_CALLBACK = "checkpoint callback"
SHARD = "shard"
STEPS = "steps"
FIT = "fit"
ELASTIC = "elastic"
LOAD_MODEL = "load model"

_HOROVOD = {
    "init": INIT,
    "rank": RANK,
    "cross_rank": RANK,
    "rank_op": RANK,
    "local_rank": LOCAL_RANK,
    "local_rank_op": LOCAL_RANK,
    "size": SIZE,
    "size_op": SIZE,
    "local_size": LOCAL_SIZE,
    "local_size_op": LOCAL_SIZE,
    "cross_size": LOCAL_SIZE,
    "DistributedOptimizer": DISTRIBUTE,
    "PartialDistributedOptimizer": DISTRIBUTE,
    "DistributedAdasumOptimizer": DISTRIBUTE,
    "DistributedGradientTape": DISTRIBUTE,
    "PartialDistributedGradientTape": DISTRIBUTE,
    "DistributedTrainer": DISTRIBUTE,
    "load_model": LOAD_MODEL,
    "broadcast_parameters": BROADCAST,
    "broadcast_optimizer_state": BROADCAST,
    "broadcast_variables": BROADCAST,
    "broadcast_global_variables": BROADCAST,
    "broadcast_": BROADCAST,
    "broadcast_async_": BROADCAST,
    "broadcast": COLLECTIVE,
    "broadcast_async": COLLECTIVE,
    "broadcast_object": COLLECTIVE,
    "BroadcastGlobalVariablesCallback": BROADCAST_CALLBACK,
    "BroadcastGlobalVariablesHook": BROADCAST_CALLBACK,
    "MetricAverageCallback": AVERAGE_CALLBACK,
    "LearningRateWarmupCallback": WARMUP,
    "LearningRateScheduleCallback": WARMUP,
    "allgather": REDUCE,
    "allgather_async": REDUCE,
    "allgather_object": REDUCE,
    "grouped_allgather": REDUCE,
    "allreduce": REDUCE,
    "allreduce_": REDUCE,
    "allreduce_async": REDUCE,
    "allreduce_async_": REDUCE,
    "grouped_allreduce": REDUCE,
    "grouped_allreduce_": REDUCE,
    "grouped_allreduce_async": REDUCE,
    "grouped_allreduce_async_": REDUCE,
    "sparse_allreduce_async": REDUCE,
    "reducescatter": REDUCE,
    "grouped_reducescatter": REDUCE,
    "alltoall": COLLECTIVE,
    "barrier": BARRIER,
    "TorchState": ELASTIC,
    "TensorFlowState": ELASTIC,
    "TensorFlowKerasState": ELASTIC,
    "KerasState": ELASTIC,
    "ElasticSampler": SHARD,
}

_HVDKIT = {
    "init": INIT,
    "pin_device": PIN,
    "scale_lr": SCALE,
    "warmup": WARMUP,
    "Warmup": WARMUP,
    "LearningRateSchedule": WARMUP,
    "init_process_group": INIT,
    "distribute": DISTRIBUTE,
    "broadcast_state": BROADCAST,
    "BroadcastState": BROADCAST_CALLBACK,
    "Checkpoints": CHECKPOINTS,
    "Checkpoint": CHECKPOINT_CALLBACK,
    "shard": SHARD,
    "steps_per_epoch": STEPS,
    "average_metrics": REDUCE,
    "AverageMetrics": AVERAGE_CALLBACK,
    "check_agreement": COLLECTIVE,
    "fit": FIT,
}

_TORCH_DISTRIBUTED = {
    "init_process_group": INIT,
    "get_rank": RANK,
    "get_node_local_rank": LOCAL_RANK,
    "get_world_size": SIZE,
    "broadcast": BROADCAST,
    "broadcast_object_list": COLLECTIVE,
    "barrier": BARRIER,
    "monitored_barrier": BARRIER,
    "all_reduce": REDUCE,
    "all_reduce_coalesced": REDUCE,
    "reduce": REDUCE,
    "all_gather": REDUCE,
    "all_gather_object": REDUCE,
    "all_gather_into_tensor": REDUCE,
    "gather": REDUCE,
    "gather_object": REDUCE,
    "reduce_scatter": REDUCE,
    "scatter": COLLECTIVE,
    "scatter_object_list": COLLECTIVE,
    "all_to_all": COLLECTIVE,
}

_MPI = {
    "get_rank": RANK,
    "rank": RANK,
    "get_size": SIZE,
    "size": SIZE,
    "bcast": COLLECTIVE,
    "barrier": BARRIER,
    "allreduce": REDUCE,
    "reduce": REDUCE,
    "allgather": REDUCE,
    "gather": REDUCE,
    "scatter": COLLECTIVE,
    "alltoall": COLLECTIVE,
}

RANK_VARIABLES = {
    "RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK", "SLURM_PROCID", "HOROVOD_RANK",
    "PALS_RANKID", "ALPS_APP_PE", "JSM_NAMESPACE_RANK", "FLUX_TASK_RANK",
}  # fmt: skip
LOCAL_RANK_VARIABLES = {
    "LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID",
    "HOROVOD_LOCAL_RANK", "PALS_LOCAL_RANKID", "JSM_NAMESPACE_LOCAL_RANK", "FLUX_TASK_LOCAL_ID",
}  # fmt: skip
SIZE_VARIABLES = {
    "WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_NTASKS", "SLURM_NPROCS",
    "HOROVOD_SIZE", "PALS_SIZE", "JSM_NAMESPACE_SIZE",
}  # fmt: skip
"""What launchers call them in the environment."""

STARTS_DDP = "hvdkit.torch.init_process_group"
"""hvdkit's start of PyTorch's own DDP: what is distributed is DDP's, the other steps may still be hvdkit's."""

MODULES = re.compile(
    r"(horovod\.(torch|tensorflow\.keras|tensorflow|keras|mxnet|spark|ray)|hvdkit\.(torch|tensorflow|keras))\b"
)
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

DDP = {
    "torch.nn.parallel.DistributedDataParallel",
    "torch.nn.parallel.distributed.DistributedDataParallel",
    "apex.parallel.DistributedDataParallel",
    "apex.parallel.distributed.DistributedDataParallel",
}
SAMPLERS = {
    "torch.utils.data.distributed.DistributedSampler",
    "torch.utils.data.DistributedSampler",
}
LOADERS = {
    "torch.utils.data.DataLoader",
    "torch.utils.data.dataloader.DataLoader",
    "torch_geometric.loader.DataLoader",
    "torch_geometric.data.DataLoader",
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


def role(name: str | None) -> str | None:
    """What a function is for, by its full name; None for every function that none of the eight steps needs."""
    if name is None or "." not in name:
        return None
    root, _, rest = name.partition(".")
    last = name.rpartition(".")[2]
    if root == "horovod":
        return ELASTIC if name.endswith("elastic.run") else _HOROVOD.get(last)
    if root == "hvdkit":
        adapter = rest.partition(".")[0]
        if adapter in ("torch", "tensorflow", "keras"):
            return _HVDKIT.get(last)
        return {"scale_lr": SCALE, "steps_per_epoch": STEPS, "Shard": SHARD}.get(last) if adapter == "steps" else None
    if name in DDP:
        return DISTRIBUTE
    if name.startswith("torch.distributed."):
        return _TORCH_DISTRIBUTED.get(last)
    if root == "mpi4py":
        return _MPI.get(last.lower())
    return None


def library_of(name: str) -> str | None:
    """The library that a full name belongs to: "horovod", "hvdkit", "ddp", or None."""
    if name.startswith("horovod.") or name == "horovod":
        return "horovod"
    if re.match(r"hvdkit\.(torch|tensorflow|keras)\b", name):
        return "hvdkit"
    if name in DDP or (name.startswith("torch.distributed.") and role(name) is not None):
        return "ddp"
    return None
