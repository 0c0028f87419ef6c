# Copyright Spack Project Developers. See COPYRIGHT file for details.
#
# SPDX-License-Identifier: (Apache-2.0 OR MIT)

from spack_repo.builtin.build_systems.python import PythonPackage

from spack.package import *


class PyHvdkit(PythonPackage):
    """The eight steps of data-parallel training with Horovod, and the tools around them."""

    pypi = "hvdkit/hvdkit-0.3.0.tar.gz"

    license("Apache-2.0")

    # Without a checksum Spack installs a checkout only: spack develop --path DIR py-hvdkit@0.3.0
    version("0.3.0")

    variant("mpi", default=True, description="Ranks over MPI, and hvdkit.arrays")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-setuptools@77:80", type="build")
    depends_on("py-click@8.1:", type=("build", "run"))
    depends_on("py-libcst@1.5:", type=("build", "run"))
    depends_on("py-msgspec@0.18:", type=("build", "run"))
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-rich@13:", type=("build", "run"))
    # Not py-horovod, which does not build against today's frameworks: `hvdkit install` builds it.
    depends_on("py-mpi4py@4:", type=("build", "run"), when="+mpi")
    depends_on("mpi", type=("build", "run"), when="+mpi")
