"""Builds Horovod from its released source for the frameworks found here, and installs it.

::

    cli
     ├── here          what is on this machine, as facts; the standard library alone, since a Python without hvdkit's
     │                 dependencies runs it (.ci/gpu-build)
     ├── plan          facts and options in; settings, run paths and cache key out; or one sentence that says what is
     │                 missing
     ├── cache         one wheel for each key: locked, whole, verified
     ├── build         source -> adjust (by patches/) -> compiler -> wheel, through runner; and the one step that
     │                 changes the environment, undone when it fails
     └── record        what a build was made of: written into the wheel, read by doctor and launcher

``plan`` does nothing but compute. ``mpi_recorder`` compiles what ``hvdkit launch --mpi-profile`` preloads. Nothing here
imports a framework.
"""
