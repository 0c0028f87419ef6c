"""``python -m hvdkit.datasets``: show a data set, and fetch it where there is a network."""

from __future__ import annotations

import logging
import sys

import click
import numpy as np

from hvdkit.common.commands import run
from hvdkit.datasets.loading import Dataset, load


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("name", metavar="NAME")
@click.option(
    "--directory", metavar="D", help="Where the files are, or go: D/NAME and D [HVDKIT_DATA, else user data]."
)
@click.option("--download", is_flag=True, help="Fetch the files that are missing, once, and verify their checksums.")
def datasets(name: str, directory: str | None, download: bool) -> None:
    """Load the data set NAME and say what is in it.

    NAME is digits (bundled with scikit-learn), mnist, fashion_mnist, cifar10 (from files) or synthetic.

    \b
    On a login node, before the job:   python -m hvdkit.datasets mnist --download
    For all nodes of a cluster:        python -m hvdkit.datasets cifar10 --download --directory /shared/data
                                       export HVDKIT_DATA=/shared/data

    Exit status: 0 loaded, 1 corrupt, 2 missing or bad usage.
    """
    for line in _description(load(name, directory=directory, download=download)):
        click.echo(line)


def _description(data: Dataset) -> list[str]:
    height, width, channels = data.x_train.shape[1:]
    lines = [f"{data.name}: {data.classes} classes, images {height} x {width} x {channels}, float32 in [0, 1]"]
    for part, labels in (("train", data.y_train), ("test", data.y_test)):
        counts = np.bincount(labels, minlength=data.classes)
        lines.append(f"  {part:<5} {len(labels):>6} samples, per class {' '.join(map(str, counts))}")
    return lines


def main(argv: list[str] | None = None) -> int:
    """Run the command line and return its exit status; a mistake is one sentence on stderr."""
    logging.basicConfig(level=logging.INFO, format="hvdkit: %(message)s")
    return run(datasets, sys.argv[1:] if argv is None else argv, "python -m hvdkit.datasets")


if __name__ == "__main__":
    sys.exit(main())
