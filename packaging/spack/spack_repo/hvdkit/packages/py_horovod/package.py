# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHorovod(PythonPackage):
    """Horovod for today's frameworks, as `hvdkit install` builds it: the released source and hvdkit's patches."""

    homepage = "https://github.com/horovod/horovod"
    pypi = "horovod/horovod-0.28.1.tar.gz"

    license("Apache-2.0")

    version("0.28.1", sha256="92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0")

    variant(
        "frameworks",
        default="pytorch",
        description="Frameworks to build for",
        values=("pytorch", "tensorflow"),
        multi=True,
    )
    variant("mpi", default=True, description="Over MPI, beside Gloo")
    variant("cuda", default=False, description="Collectives of tensors on GPUs, over NCCL")

    depends_on("c", type="build")
    depends_on("cxx", type="build")
    depends_on("cmake@3.13:", type="build")
    depends_on("python@3.11:3.13", type=("build", "run"))
    depends_on("py-setuptools@:80", type="build")
    depends_on("py-cloudpickle", type=("build", "run"))
    depends_on("py-packaging", type=("build", "run"))
    depends_on("py-psutil", type=("build", "run"))
    depends_on("py-pyyaml", type=("build", "run"))
    depends_on("py-torch", type=("build", "link", "run"), when="frameworks=pytorch")
    depends_on("py-torch+cuda", type=("build", "link", "run"), when="frameworks=pytorch +cuda")
    depends_on("py-torch~cuda", type=("build", "link", "run"), when="frameworks=pytorch ~cuda")
    depends_on("py-tensorflow", type=("build", "link", "run"), when="frameworks=tensorflow")
    depends_on("mpi", when="+mpi")
    depends_on("nccl@2:", when="+cuda")
    depends_on("cuda", when="+cuda")

    # Where each applies: the head of the file says it, in words.
    for name, condition in (
        ("01-cxx20", ""),
        ("02-cxx20-torch", "frameworks=pytorch"),
        ("03-cxx20-tensorflow", "frameworks=tensorflow"),
        ("04-no-xla-ops", "frameworks=tensorflow"),
        ("05-gloo-stall-inspector", ""),
        ("06-gloo-interface", ""),
        ("07-gloo-cstdint", ""),
        ("08-python-include", "frameworks=pytorch"),
        ("09-jsrun-which", ""),
        ("10-cycle-on-request", ""),
        ("11-torch-sleeping-wait", "frameworks=pytorch"),
        ("12-no-debug-info", ""),
        ("13-unity-torch", "frameworks=pytorch ~cuda"),
        ("14-unity-tensorflow", "frameworks=tensorflow ~cuda"),
        ("15-no-cuda-search", "~cuda"),
        ("16-no-cuda-torch", "frameworks=pytorch ~cuda"),
        ("17-join-is-stateful", "frameworks=tensorflow"),
        ("18-mpi-in-parts", ""),
        ("19-gloo-loop-yields", ""),
        ("20-torch-through-host", "frameworks=pytorch +cuda"),
        ("21-torch-driver-name", "frameworks=pytorch +cuda"),
        ("22-bfloat16", ""),
        ("23-bfloat16-torch", "frameworks=pytorch"),
        ("24-bfloat16-tensorflow", "frameworks=tensorflow ~cuda"),
        ("25-gloo-send-buffer", ""),
        ("26-nccl-errors", "+cuda"),
        ("27-nccl-reducescatter", "+cuda"),
        ("28-hierarchical-allgather-cpu", "+cuda"),
        ("29-elastic-fixed-parameters", ""),
        ("30-adasum-fusion", "+cuda"),
        ("31-elastic-process-sets", ""),
        ("32-torch-unnamed-tensors", "frameworks=pytorch"),
        ("33-keras-3-variables", "frameworks=tensorflow"),
        ("34-keras-3-optimizer", "frameworks=tensorflow"),
        ("35-keras-3-callbacks", "frameworks=tensorflow"),
        ("36-keras-3-batch-norm", "frameworks=tensorflow"),
        ("37-elastic-tensorflow-errors", "frameworks=tensorflow"),
        ("38-horovodrun-open-mpi-5", ""),
        ("39-horovodrun-mpich", ""),
        ("40-tensorflow-barrier", "frameworks=tensorflow"),
        ("41-gloo-init-again", ""),
        ("42-int8", ""),
        ("43-gloo-receive-first", ""),
    ):
        patch(f"../../../../../../hvdkit/prepare/install/patches/{name}.patch", when=condition or None)

    def setup_build_environment(self, env: EnvironmentModifications) -> None:
        frameworks = self.spec.variants["frameworks"].value
        parts = {
            "PYTORCH": "pytorch" in frameworks,
            "TENSORFLOW": "tensorflow" in frameworks,
            "MXNET": False,
            "GLOO": True,
            "MPI": self.spec.satisfies("+mpi"),
            "NVTX": False,
        }
        for part, wanted in parts.items():
            env.set(f"HOROVOD_{'WITH' if wanted else 'WITHOUT'}_{part}", "1")
        # Gloo's own CMake file asks for a policy version that CMake 4 no longer has.
        env.set("CMAKE_POLICY_VERSION_MINIMUM", "3.5")
        env.set("MAKEFLAGS", f"-j{make_jobs}")
        if self.spec.satisfies("+cuda"):
            env.set("HOROVOD_GPU_OPERATIONS", "NCCL")
            env.set("HOROVOD_CUDA_HOME", self.spec["cuda"].prefix)
            env.set("HOROVOD_NCCL_HOME", self.spec["nccl"].prefix)
