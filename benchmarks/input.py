"""What it costs to load a batch: from memory, HDF5, a NumPy file and safetensors, measured in turn in one process.

    python benchmarks/input.py          (--samples 2048 --batch-size 32 --rounds 15 --json input.json)

The data are those of examples/pytorch/transformer.py: source (n, 1, 512) and target (n, 20, 512), float32, in a new
order each epoch. Every reader goes through PyTorch's DataLoader without workers, and each round gives every reader the
same batches, in a new order of readers; the ratio is that of the medians of milliseconds per batch to memory's. The
files are in the page cache: a file system that must be waited for comes on top.

    python benchmarks/input.py --images          (--samples 2048 --batch-size 32 --rounds 15 --json images.json)

Arrays through ``hvdkit.tensorflow.shard`` and ``hvdkit.keras.shard`` on one rank, against plain ``tf.data`` (slices,
shuffle, batch, prefetch), whole epochs in turn: large images (128, 128, 3) float32, and eight times as many small ones
(28, 28, 1). The last loader gets a ``tf.data.Dataset``, which is a stream where it is large: the ranks agree on each
step. The ratio is that of samples per second to plain tf.data's.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from pathlib import Path

import h5py
import numpy as np
import torch

from hvdkit.datasets import HDF5Dataset, write_hdf5

NAMES = ("source", "target")


class PerSample:
    """The plain way: one handle, one read for each sample and array."""

    def __init__(self, path):
        self.file = h5py.File(path, "r")
        self.arrays = [self.file[name] for name in NAMES]

    def __len__(self):
        return len(self.arrays[0])

    def __getitem__(self, index):
        return tuple(array[index] for array in self.arrays)


class Reopened(PerSample):
    """The same with the file opened for each sample, as code does that has to work in forked workers."""

    def __init__(self, path):
        super().__init__(path)
        self.path = path

    def __getitem__(self, index):
        with h5py.File(self.path, "r") as file:
            return tuple(file[name][index] for name in NAMES)


class PerBatch(PerSample):
    """One handle; h5py's own selection of a list of rows for each batch."""

    def __getitems__(self, indices):
        order = np.argsort(indices)
        back = np.argsort(order)
        wanted = np.asarray(indices)[order]
        return list(zip(*(array[wanted][back] for array in self.arrays), strict=True))


class Mapped:
    """NumPy files, mapped into memory."""

    def __init__(self, directory):
        self.arrays = [np.load(directory / f"{name}.npy", mmap_mode="r") for name in NAMES]

    def __len__(self):
        return len(self.arrays[0])

    def __getitems__(self, indices):
        return list(zip(*(array[indices] for array in self.arrays), strict=True))


class SafeTensors:
    """A safetensors file, one slice for each sample and tensor."""

    def __init__(self, path):
        from safetensors import safe_open

        self.file = safe_open(path, "pt")
        self.slices = [self.file.get_slice(name) for name in NAMES]

    def __len__(self):
        return self.slices[0].get_shape()[0]

    def __getitem__(self, index):
        return tuple(part[index] for part in self.slices)


def readers(directory, data):
    """Name to data set; writes the files."""
    arrays = {name: part.numpy() for name, part in zip(NAMES, data, strict=True)}
    paths = {name: directory / f"{name}.h5" for name in ("contiguous", "chunk of 1", "chunk of 32", "automatic chunks")}
    write_hdf5(paths["contiguous"], arrays)
    for path, rows in ((paths["chunk of 1"], 1), (paths["chunk of 32"], 32), (paths["automatic chunks"], None)):
        with h5py.File(path, "w") as file:
            for name, array in arrays.items():
                file.create_dataset(name, data=array, chunks=True if rows is None else (rows, *array.shape[1:]))
    for name, array in arrays.items():
        np.save(directory / f"{name}.npy", array)
    found = {"memory (TensorDataset)": torch.utils.data.TensorDataset(*data)}
    for layout, path in paths.items():
        found[f"HDF5 {layout}, reopened per sample"] = Reopened(path)
        found[f"HDF5 {layout}, per sample"] = PerSample(path)
        found[f"HDF5 {layout}, h5py's batch"] = PerBatch(path)
        found[f"HDF5 {layout}, HDF5Dataset"] = HDF5Dataset(path, NAMES)
    found["npy memory map"] = Mapped(directory)
    try:
        from safetensors.torch import save_file
    except ImportError:
        print("safetensors is not installed: left out (pip install safetensors)")
        return found
    save_file(dict(zip(NAMES, data, strict=True)), directory / "data.safetensors")
    found["safetensors, per sample"] = SafeTensors(directory / "data.safetensors")
    return found


def seconds_per_batch(dataset, batches):
    """Of one pass over these batches."""
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)
    start = time.perf_counter()
    checksum = sum(float(target[0, 0, 0]) for _, target in loader)
    return (time.perf_counter() - start) / len(batches), checksum


def measure(found, args):
    """Milliseconds per batch of every round, by reader."""
    generator, shuffled = np.random.default_rng(0), random.Random(0)  # noqa: S311
    times = {name: [] for name in found}
    for number in range(args.rounds + 1):
        order = generator.permutation(args.samples)[: args.batch_size * args.batches].tolist()
        batches = [order[at : at + args.batch_size] for at in range(0, len(order), args.batch_size)]
        checksums = set()
        for name in shuffled.sample(list(found), len(found)):
            seconds, checksum = seconds_per_batch(found[name], batches)
            checksums.add(checksum)
            if number:  # the first round warms up
                times[name].append(1e3 * seconds)
        if len(checksums) > 1:
            raise SystemExit(f"the readers gave different data: {checksums}")
    return times


def image_loaders(shape, samples, batch_size):
    """Name to what gives an epoch's batches in each iteration."""
    import tensorflow as tf

    import hvdkit.keras
    import hvdkit.tensorflow

    world = hvdkit.tensorflow.init()
    images = np.random.default_rng(0).random((samples, *shape), dtype=np.float32)
    data = images, np.arange(samples)
    plain = tf.data.Dataset.from_tensor_slices(data).shuffle(samples).batch(batch_size, drop_remainder=True)
    stream = tf.data.Dataset.from_tensor_slices(data).take(samples)  # without it, shard takes the arrays
    return {
        "plain tf.data": plain.prefetch(tf.data.AUTOTUNE),
        "hvdkit.tensorflow.shard": hvdkit.tensorflow.shard(data, world, batch_size),
        "hvdkit.keras.shard": hvdkit.keras.shard(data, world, batch_size).reader().tf_dataset(),  # as fit reads it
        "hvdkit.tensorflow.shard of a tf.data.Dataset": hvdkit.tensorflow.shard(stream, world, batch_size),
    }


def measure_images(args):
    """Print and return the rates of each loader, by images' shape."""
    results, shuffled = {}, random.Random(0)  # noqa: S311
    for shape, samples in (((128, 128, 3), args.samples), ((28, 28, 1), 8 * args.samples)):
        loaders = image_loaders(shape, samples, args.batch_size)
        times = {name: [] for name in loaders}
        for number in range(args.rounds + 1):
            for name in shuffled.sample(list(loaders), len(loaders)):
                start = time.perf_counter()
                batches = sum(1 for _ in loaders[name])
                if number:  # the first round warms up
                    times[name].append(1e3 * (time.perf_counter() - start) / batches)
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(
            f"images {shape}, {args.rounds} epochs of {samples}, batches of {args.batch_size}, {os.cpu_count()} cores"
        )
        for name, median in medians.items():
            print(f"{name:<50} {medians['plain tf.data'] / median:>9.2f} x plain {median:>9.3f} ms/batch")
        results["x".join(map(str, shape))] = {
            name: {"ms_per_batch": median, "ratio": medians["plain tf.data"] / median}
            for name, median in medians.items()
        }
    return results


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=2048, help="in the data set (default 2048)")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a batch (default 32)")
    parser.add_argument("--batches", type=int, default=16, help="batches in a round (default 16)")
    parser.add_argument("--rounds", type=int, default=15, help="rounds that are measured (default 15)")
    parser.add_argument("--images", action="store_true", help="measure images through shard against plain tf.data")
    parser.add_argument("--directory", help="where to write (default: a temporary directory)")
    parser.add_argument("--json", help="write the numbers to this file, too")
    args = parser.parse_args()
    if min(args.batch_size, args.batches, args.rounds) < 1:
        parser.error("--batch-size, --batches and --rounds are at least 1")
    if args.batch_size * args.batches > args.samples:
        parser.error(f"a round takes batch-size x batches samples, at most --samples {args.samples} of them")
    for directory in (args.directory, args.json and Path(args.json).absolute().parent):
        if directory and not os.access(directory, os.W_OK):
            parser.error(f"{str(directory)!r} is no directory that can be written to")
    if args.images:
        results = measure_images(args)
        if args.json:
            Path(args.json).write_text(json.dumps(results, indent=1))
        return
    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(0)
    data = [torch.rand((args.samples, length, 512), generator=generator) for length in (1, 20)]
    with tempfile.TemporaryDirectory(dir=args.directory) as directory:
        times = measure(readers(Path(directory), data), args)
    medians = {name: statistics.median(values) for name, values in times.items()}
    base = medians["memory (TensorDataset)"]
    print(f"{args.rounds} rounds of {args.batches} batches of {args.batch_size}, {os.cpu_count()} cores")
    print(f"{'reader':<50} {'x memory':>9} {'ms/batch':>9} {'samples/s':>10}")
    for name, median in medians.items():
        print(f"{name:<50} {median / base:>9.2f} {median:>9.3f} {1e3 * args.batch_size / median:>10.0f}")
    if args.json:
        result = {name: {"ms_per_batch": median, "ratio": median / base} for name, median in medians.items()}
        Path(args.json).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
