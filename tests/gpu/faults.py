"""Faults that are put into Horovod's source or the stand-in on purpose, each with the job that must find it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from build import KERNELS, Edit

NCCL = "horovod/common/ops/nccl_operations.cc"
GPU = "horovod/common/ops/gpu_operations.cc"
MPI = "horovod/common/ops/mpi_operations.cc"
ADASUM = "horovod/common/ops/adasum_gpu_operations.cc"
SETS = "horovod/common/process_set.cc"
PARAMETERS = "horovod/common/parameter_manager.cc"


@dataclass(frozen=True)
class Fault:
    """What is wrong on purpose.

    Attributes:
        name: in one line.
        job: the name of the job of ``run.py`` that must not be right with it.
        edits: of Horovod's source.
        environ: of the stand-in.
    """

    name: str
    job: str
    edits: tuple[Edit, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)


def _in(function: str, pattern: str, new: str, file: str = NCCL) -> tuple[Edit, ...]:
    """Change what matches first in the body of a function."""
    return ((file, rf"(?s)(\n[^\n]*{function}\((?:(?!\n}}\n).)*?){pattern}", rf"\1{new}"),)


def _no_wait(operation: str) -> tuple[Edit, ...]:
    return _in(f"{operation}::WaitForData", r"HVD_GPU_CHECK\(gpuStreamWaitEvent[^;]*;", "")


FAULTS = (
    Fault("allreduce does not wait for the framework's stream", "2 ranks", _no_wait("NCCLAllreduce")),
    Fault("allgather does not wait for the framework's stream", "2 ranks", _no_wait("NCCLAllgather")),
    Fault("broadcast does not wait for the framework's stream", "2 ranks", _no_wait("NCCLBroadcast")),
    Fault("alltoall does not wait for the framework's stream", "2 ranks", _no_wait("NCCLAlltoall")),
    Fault("reducescatter does not wait for the framework's stream", "2 ranks", _no_wait("NCCLReducescatter")),
    Fault(
        "torus allreduce does not wait for the framework's stream",
        "torus allreduce 2+2",
        _no_wait("NCCLTorusAllreduce"),
    ),
    Fault(
        "hierarchical allreduce does not wait for the framework's stream",
        "hierarchical allreduce 2+2",
        _no_wait("NCCLHierarchicalAllreduce"),
    ),
    Fault("cudaStreamWaitEvent does nothing", "2 ranks", environ={"STANDIN_NO_WAIT_EVENT": "1"}),
    Fault(
        "an allgather's output is used before its memory is free",
        "2 ranks",
        _in("NCCLAllgather::AllocateOutput", r"HVD_GPU_CHECK\(gpuStreamWaitEvent[^;]*;", ""),
    ),
    Fault(
        "an operation is finished before its stream is",
        "2 ranks",
        _in("GPUOpContext::FinalizeGPUQueue", r'gpu_context_->RecordEvent\(event_queue, "", \*stream\);', "", GPU),
    ),
    Fault(
        "with async completion, the framework gets no event",
        "async completion",
        ((GPU, r"event = gpu_context->RecordEvent\(current_stream\);", ""),),
    ),
    Fault(
        "ncclRemoteError is ignored",
        "ncclRemoteError in allreduce",
        ((NCCL, r"if \(nccl_async_err != ncclSuccess\) \{", "if (false) {"),),
    ),
    Fault(
        "an alltoall does not ask for errors",
        "ncclRemoteError in alltoall",
        _in("NCCLAlltoall::Execute", "entries, true, nccl_op_context_.error_check_callback_", "entries"),
    ),
    Fault(
        "an aborted operation counts as done",
        "rank 1 dies unnoticed in allreduce",
        ((NCCL, r"closed = true;", ""),),
    ),
    Fault(
        "an allreduce leaves out the last element",
        "2 ranks",
        _in("NCCLAllreduce::Execute", r"\(size_t\)num_elements,", "(size_t)num_elements - 1,"),
    ),
    Fault(
        "a rank has another count",
        "3 ranks",
        ((NCCL, r"(recvcounts\[0\])( \* element_size, ncclChar)", r"(\1 - global_rank)\2"),),
    ),
    Fault(
        "a broadcast comes from rank 0",
        "2 ranks",
        _in("NCCLBroadcast::Execute", r"ncclChar, e\.root_rank", "ncclChar, 0"),
    ),
    Fault(
        "an uneven allgather has one root",
        "3 ranks",
        ((NCCL, r"ncclChar, rc, ", "ncclChar, 0, "),),
    ),
    Fault(
        "tensors lie one byte off in the fusion buffer",
        "copies one by one",
        _in(
            "GPUAllreduce::MemcpyEntryInFusionBuffer",
            "\n      buffer_data_at_offset",
            "(char*)buffer_data_at_offset + 1",
            GPU,
        ),
    ),
    Fault("int32 is added as float32", "2 ranks", ((NCCL, r"return ncclInt32;", "return ncclFloat32;"),)),
    Fault("float16 is added as bfloat16", "2 ranks", ((NCCL, r"return ncclFloat16;", "return ncclBfloat16;"),)),
    Fault(
        "a result is not scaled",
        "2 ranks",
        _in("NCCLAllreduce::Execute", r"if \(postscale_factor != 1\.0\)", "if (false)"),
    ),
    Fault("a minimum is a maximum", "2 ranks", _in("NCCLAllreduce::Execute", "ncclMin", "ncclMax")),
    Fault(
        "a group of sends has no end",
        "2 ranks",
        _in("NCCLAlltoall::Execute", r"ncclGroupEnd\(\)", "ncclSuccess"),
    ),
    Fault(
        "an uneven reducescatter sends the same part to all",
        "3 ranks",
        ((NCCL, r"offset_bytes \+= recvcounts\[recv_rank\] \* element_size;", ""),),
    ),
    Fault(
        "a fused reducescatter receives at multiples of the first part",
        "4 ranks",
        _in("NCCLReducescatter::Execute", r"std::accumulate.*?\(size_t\)0\)", "process_set_rank * recvcounts[0]"),
    ),
    Fault(
        "a kernel leaves out what does not fill a word",
        "2 ranks",
        _in("batched_memcpy_d", "remainder > 0 && idx < remainder", "false", KERNELS),
    ),
    Fault(
        "a torus allreduce stays on its host",
        "torus allreduce 2+2",
        ((NCCL, r"ncclOp, \*cross_nccl_op_context_\.nccl_comm_", "ncclOp, *local_nccl_op_context_.nccl_comm_"),),
    ),
    Fault(
        "a hierarchical allreduce forgets the rest",
        "hierarchical allreduce 2+2",
        _in("NCCLHierarchicalAllreduce::Execute", r"if \(num_elements_remaining > 0\)", "if (false)"),
    ),
    Fault(
        "the timeline does not name an allreduce",
        "timeline",
        _in("NCCLAllreduce::Execute", "event_queue, NCCL_ALLREDUCE", "event_queue, NCCL_REDUCE"),
    ),
    Fault(
        "a torus allreduce asks only about its own host",
        "ncclRemoteError between hosts in torus",
        _in("NCCLTorusAllreduce::Execute", r"true,\s+error_check", "true, local_nccl_op_context_.error_check"),
    ),
    Fault(
        "Adasum counts without the gaps between tensors",
        "adasum 2+2",
        (
            *_in("NcclHierarchical", "AllreduceOp::MemcpyInFusionBuffer", "MemcpyInFusionBuffer", ADASUM),
            *_in("NcclHierarchical", "AllreduceOp::MemcpyOutFusionBuffer", "MemcpyOutFusionBuffer", ADASUM),
        ),
    ),
    Fault(
        "a hierarchical allgather copies a GPU's tensors on the host",
        "hierarchical allgather 2+2",
        _in("MPIHierarchicalAllgather::Enabled", r"entries\[0\]\.device == CPU_DEVICE_ID && ", "", MPI),
    ),
    Fault(
        "a new start sets what the first start has fixed",
        "ncclRemoteError in allreduce",
        ((PARAMETERS, r"else if \(fixed_values_\.find\(variable\) == fixed_values_\.end\(\)\)", "else"),),
    ),
    Fault(
        "a process set waits for a lost rank to agree",
        "rank 1 dies in allreduce",
        ((SETS, r"id_to_process_set_\[id\]\.Finalize\(status\);\s+DeregisterProcessSet\(id\);", "throw;"),),
    ),
)
