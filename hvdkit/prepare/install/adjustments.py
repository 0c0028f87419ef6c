"""What today's compilers and frameworks need changed in the released source of Horovod 0.28.1: a table.

Each row states how many times its old text occurs; anything else means that this is not the source the table
was written for, and nothing is written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """What a build is for: the names of its frameworks and its GPU operations ("none", "nccl", "mpi").

    ``plain``: only what it needs to compile and to work, nothing that makes it faster.
    """

    frameworks: frozenset[str]
    gpu: str
    plain: bool = False


@dataclass(frozen=True)
class Condition:
    """When a row applies: in words, and as a test."""

    words: str
    holds: Callable[[Target], bool]


ALWAYS = Condition("always", lambda target: True)  # noqa: ARG005
WITH_TORCH = Condition("built for PyTorch", lambda target: "torch" in target.frameworks)
WITH_TENSORFLOW = Condition("built for TensorFlow", lambda target: "tensorflow" in target.frameworks)
WITHOUT_GPU = Condition("--gpu none", lambda target: target.gpu == "none")
WITH_GPU = Condition("--gpu nccl or mpi", lambda target: target.gpu != "none")
TORCH_WITHOUT_GPU = Condition(
    "built for PyTorch with --gpu none", lambda target: "torch" in target.frameworks and target.gpu == "none"
)
TENSORFLOW_WITHOUT_GPU = Condition(
    "built for TensorFlow with --gpu none", lambda target: "tensorflow" in target.frameworks and target.gpu == "none"
)
FASTER = Condition("without --plain", lambda target: not target.plain)
FASTER_TORCH = Condition(
    "built for PyTorch without --plain", lambda target: "torch" in target.frameworks and not target.plain
)


@dataclass(frozen=True)
class Adjustment:
    """One row: in ``file``, ``old`` occurs exactly ``count`` times and becomes ``new``."""

    name: str
    file: str
    old: str
    new: str
    when: Condition
    why: str
    count: int = 1


ADJUSTMENTS: tuple[Adjustment, ...] = (
    Adjustment(
        name="cxx20",
        file="CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        when=ALWAYS,
        why="The common sources are compiled against the headers of today's frameworks, which need C++20.",
    ),
    Adjustment(
        name="cxx20-torch",
        file="horovod/torch/CMakeLists.txt",
        old="set(CMAKE_CXX_STANDARD 14)",
        new="set(CMAKE_CXX_STANDARD 20)",
        when=WITH_TORCH,
        why="PyTorch's headers refuse C++14 since 2.1 and use C++20 today.",
    ),
    Adjustment(
        name="cxx20-tensorflow",
        file="horovod/tensorflow/CMakeLists.txt",
        old="    set(CMAKE_CXX_STANDARD 17)\n    set(Tensorflow_CXX17 TRUE)",
        new="    set(CMAKE_CXX_STANDARD 20)\n    set(Tensorflow_CXX17 FALSE)",
        when=WITH_TENSORFLOW,
        why="TensorFlow's headers need C++20; and since all sources are then compiled to one standard, the second "
        "copy of Gloo that was made for C++17 is not needed.",
    ),
    Adjustment(
        name="no-xla-ops",
        file="horovod/tensorflow/CMakeLists.txt",
        old='list(APPEND TF_SOURCES "${PROJECT_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc")\n',
        new="",
        when=WITH_TENSORFLOW,
        why="TensorFlow's wheels lack a header that this file includes; it only serves XLA on GPUs.",
    ),
    Adjustment(
        name="gloo-stall-inspector",
        file="horovod/common/gloo/gloo_controller.cc",
        old="global_ranks_.reserve(size_);",
        new="global_ranks_.resize(size_);",
        when=ALWAYS,
        why="A bug: the list of ranks stays empty, so that under Gloo the stall inspector never fires and a job in "
        "which one rank hangs waits for ever.",
    ),
    Adjustment(
        name="gloo-interface",
        file="horovod/common/gloo/gloo_context.cc",
        old="  device_attr.iface = gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        new="  device_attr.iface = global_context.gloo_iface_;\n  device_attr.ai_family = AF_UNSPEC;\n"
        "  auto dev = CreateDevice(device_attr);\n\n  global_ctx = global_context.ctx;",
        when=ALWAYS,
        why="A bug: process sets forget which network interface was chosen and take the one that the host's name "
        "resolves to; where that is 127.0.1.1, as on Debian, several hosts do not connect over Gloo.",
    ),
    Adjustment(
        name="gloo-cstdint",
        file="third_party/gloo/gloo/types.h",
        old="#include <iostream>\n",
        new="#include <cstdint>\n#include <iostream>\n",
        when=ALWAYS,
        why="It uses uint8_t without its header, which GCC 15 no longer brings in by the way.",
    ),
    Adjustment(
        name="python-include",
        file="horovod/torch/CMakeLists.txt",
        old="from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        new="import sysconfig; print(sysconfig.get_path('include'))",
        when=WITH_TORCH,
        why="Python 3.12 removed distutils; sysconfig gives the same directory on every version.",
    ),
    Adjustment(
        name="jsrun-which-import",
        file="horovod/runner/js_run.py",
        old="from distutils.spawn import find_executable\n",
        new="from shutil import which\n",
        when=ALWAYS,
        why="Python 3.12 removed distutils; without this, horovodrun cannot be imported there.",
    ),
    Adjustment(
        name="jsrun-which",
        file="horovod/runner/js_run.py",
        old="find_executable('jsrun')",
        new="which('jsrun')",
        when=ALWAYS,
        why="Follows from jsrun-which-import.",
    ),
    Adjustment(
        name="cycle-on-request",
        file="horovod/common/operations.cc",
        old="  if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        "    std::this_thread::sleep_for(sleep_duration);\n"
        "  }\n",
        new="  {\n"
        "    std::unique_lock<std::mutex> lock(cycle_mutex);\n"
        "    if (sleep_duration > std::chrono::steady_clock::duration::zero()) {\n"
        "      cycle_wanted.wait_for(lock, sleep_duration, [] { return cycle_waiters > 0; });\n"
        "    }\n"
        "  }\n",
        when=FASTER,
        why="The background thread sleeps out its cycle (1 ms) even while the training waits for it; now it starts at "
        "once while a thread waits for a result or a whole group of tensors has been handed over.",
    ),
    Adjustment(
        name="cycle-on-request-functions",
        file="horovod/common/operations.cc",
        old="namespace common {\n\nnamespace {\n\n// All the Horovod state",
        new="namespace common {\n\n"
        "static std::mutex cycle_mutex;\n"
        "static std::condition_variable cycle_wanted;\n"
        "static int cycle_waiters = 0;\n\n"
        "void ChangeCycleWaiters(int change) {\n"
        "  {\n"
        "    std::lock_guard<std::mutex> guard(cycle_mutex);\n"
        "    cycle_waiters += change;\n"
        "  }\n"
        "  cycle_wanted.notify_one();\n"
        "}\n\n"
        "namespace {\n\n// All the Horovod state",
        when=FASTER,
        why="Follows from cycle-on-request.",
    ),
    Adjustment(
        name="cycle-on-request-include",
        file="horovod/common/operations.cc",
        old="#include <cassert>\n",
        new="#include <cassert>\n#include <condition_variable>\n",
        when=FASTER,
        why="Follows from cycle-on-request.",
    ),
    Adjustment(
        name="cycle-on-request-header",
        file="horovod/common/operations.h",
        old="// Check that Horovod is initialized.\nStatus CheckInitialized();\n",
        new="// Check that Horovod is initialized.\nStatus CheckInitialized();\n\n"
        "// Tell the background thread how many threads more (or less) wait for a result.\n"
        "void ChangeCycleWaiters(int change);\n",
        when=FASTER,
        why="Follows from cycle-on-request.",
    ),
    Adjustment(
        name="cycle-on-group",
        file="horovod/common/operations.cc",
        old="  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);\n",
        new="  bool grouped = entries.size() > 1;\n"
        "  if (grouped) {\n"
        "    std::shared_ptr<void> waits(nullptr, [](void*) { ChangeCycleWaiters(-1); });\n"
        "    auto done = std::move(entries.back().callback);\n"
        "    entries.back().callback = [waits, done](const Status& result) { done(result); };\n"
        "  }\n"
        "  status = process_set.tensor_queue.AddToTensorQueueMulti(entries, messages);\n"
        "  if (grouped) {\n"
        "    ChangeCycleWaiters(1);  // not before: a cycle without them might be the last one\n"
        "  }\n",
        when=FASTER,
        why="Follows from cycle-on-request: TensorFlow has no thread that waits, and hands over its gradients as one "
        "group. It counts as waiting until its last tensor is reduced: a rank that came early, and then sleeps out a "
        "cycle, keeps the others waiting.",
    ),
    Adjustment(
        name="torch-sleeping-wait",
        file="horovod/torch/mpi_ops_v2.cc",
        old="  while (true) {\n"
        "    if (handle_manager.PollHandle(handle)) break;\n"
        "    {\n"
        "      py::gil_scoped_release release_python_gil;\n"
        "      std::this_thread::yield();\n"
        "    }\n"
        "  }\n",
        new="  if (!handle_manager.PollHandle(handle)) {\n"
        "    py::gil_scoped_release release_python_gil;\n"
        "    ChangeCycleWaiters(1);\n"
        "    handle_manager.Wait(handle);\n"
        "    ChangeCycleWaiters(-1);\n"
        "  }\n",
        when=FASTER_TORCH,
        why="The thread that waits for a result spins and takes the GIL in each turn, on a core that Horovod's own "
        "thread may need; now it sleeps until the result is there.",
    ),
    Adjustment(
        name="torch-sleeping-wait-header",
        file="horovod/torch/handle_manager.h",
        old="  void MarkDone(int handle, const Status& status);\n",
        new="  void MarkDone(int handle, const Status& status);\n  void Wait(int handle);\n",
        when=FASTER_TORCH,
        why="Follows from torch-sleeping-wait.",
    ),
    Adjustment(
        name="torch-sleeping-wait-member",
        file="horovod/torch/handle_manager.h",
        old="  std::mutex mutex_;\n",
        new="  std::mutex mutex_;\n  std::condition_variable done_;\n",
        when=FASTER_TORCH,
        why="Follows from torch-sleeping-wait.",
    ),
    Adjustment(
        name="torch-sleeping-wait-include",
        file="horovod/torch/handle_manager.h",
        old="#include <memory>\n",
        new="#include <condition_variable>\n#include <memory>\n",
        when=FASTER_TORCH,
        why="Follows from torch-sleeping-wait.",
    ),
    Adjustment(
        name="torch-sleeping-wait-function",
        file="horovod/torch/handle_manager.cc",
        old="  results_[handle] = std::make_shared<Status>(status);\n}\n",
        new="  results_[handle] = std::make_shared<Status>(status);\n"
        "  done_.notify_all();\n"
        "}\n\n"
        "void HandleManager::Wait(int handle) {\n"
        "  std::unique_lock<std::mutex> lock(mutex_);\n"
        "  done_.wait(lock, [&] {\n"
        "    auto result = results_.find(handle);\n"
        "    return result == results_.end() || result->second != nullptr;\n"
        "  });\n"
        "}\n",
        when=FASTER_TORCH,
        why="Follows from torch-sleeping-wait.",
    ),
    Adjustment(
        name="torch-sleeping-wait-reset",
        file="horovod/torch/handle_manager.cc",
        old="  results_.clear();\n",
        new="  results_.clear();\n  done_.notify_all();\n",
        when=FASTER_TORCH,
        why="Follows from torch-sleeping-wait.",
    ),
    Adjustment(
        name="no-debug-info",
        file="CMakeLists.txt",
        old='string(REPLACE "-O2" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        new='string(REPLACE "-O2 -g" "-O3" CMAKE_CXX_FLAGS_RELWITHDEBINFO',
        when=ALWAYS,
        why="Debug information makes the wheel twenty times larger and the build slower; function names stay.",
    ),
    Adjustment(
        name="unity-torch",
        file="horovod/torch/CMakeLists.txt",
        old="add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})\n",
        new="add_library(${PYTORCH_TARGET_LIB} SHARED ${SOURCES} ${PYTORCH_SOURCES})\n"
        "set_target_properties(${PYTORCH_TARGET_LIB} PROPERTIES UNITY_BUILD ON)\n"
        "set_source_files_properties(${PYTORCH_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)\n",
        when=TORCH_WITHOUT_GPU,
        why="Compiles Horovod's common sources in groups, which halves the time; those of PyTorch stay separate.",
    ),
    Adjustment(
        name="unity-tensorflow",
        file="horovod/tensorflow/CMakeLists.txt",
        old="add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})\n",
        new="add_library(${TF_TARGET_LIB} SHARED ${SOURCES} ${TF_SOURCES})\n"
        "set_target_properties(${TF_TARGET_LIB} PROPERTIES UNITY_BUILD ON)\n"
        "set_source_files_properties(${TF_SOURCES} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)\n",
        when=TENSORFLOW_WITHOUT_GPU,
        why="Compiles Horovod's common sources in groups, which halves the time; those of TensorFlow stay separate.",
    ),
    Adjustment(
        name="no-cuda-search",
        file="CMakeLists.txt",
        old="include(CheckLanguage)\ncheck_language(CUDA)\nif(NOT CMAKE_CUDA_COMPILER)\n",
        new="if(FALSE)\n",
        when=WITHOUT_GPU,
        why="A build without GPU operations must be the same whether or not a CUDA toolkit happens to be there.",
    ),
    Adjustment(
        name="no-cuda-torch",
        file="cmake/Modules/FindPytorch.cmake",
        old="print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
        new="print(False)",
        when=TORCH_WITHOUT_GPU,
        why="With a CUDA build of PyTorch and nvcc present, CUDA would be compiled in although nobody asked for it.",
    ),
    Adjustment(
        name="no-rocm-torch",
        file="cmake/Modules/FindPytorch.cmake",
        old="print(True if ((torch.version.hip is not None) and (ROCM_HOME is not None)) else False)",
        new="print(False)",
        when=TORCH_WITHOUT_GPU,
        why="The same for a ROCm build of PyTorch.",
    ),
)


def applying(target: Target) -> tuple[Adjustment, ...]:
    """The rows of the table that apply to a build, in order."""
    return tuple(adjustment for adjustment in ADJUSTMENTS if adjustment.when.holds(target))


def digest(adjustments: Iterable[Adjustment]) -> str:
    """SHA-256 over what the rows change, for the cache key; their reasons do not count."""
    rows = [[row.name, row.file, row.old, row.new, row.count] for row in adjustments]
    return hashlib.sha256(json.dumps(rows).encode()).hexdigest()
