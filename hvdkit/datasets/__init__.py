"""Image data sets as NumPy arrays, the same for every framework.

Why this room exists: a distributed example needs data before it needs Horovod, and the framework's own loaders
differ in layout, scaling and download behaviour, and download on every rank. Here one call gives the same float32
NHWC arrays to PyTorch, TensorFlow and Keras, from scikit-learn's bundled digits (nothing to download), from files
that the user has, or from one verified download per node.

::

    load(name)                      loading.py     validate, find, read, scale to [0, 1]; layouts, sha256, URLs
    ├── digits, synthetic                          no files needed
    └── mnist, fashion_mnist, cifar10
        ├── read them               formats.py     IDX, npz, CIFAR's batches; of a pickle no code is run
        └── fetch them              download.py    one process per node, under a lock, checksum verified

    HDF5Dataset, write_hdf5         hdf5.py        files of any size, read a batch at a time by every process

``python -m hvdkit.datasets NAME [--download]`` shows what is there and fetches what is not.
"""

from hvdkit.datasets.hdf5 import HDF5Dataset, write_hdf5
from hvdkit.datasets.loading import NAMES, Dataset, load

__all__ = ["NAMES", "Dataset", "HDF5Dataset", "load", "write_hdf5"]
