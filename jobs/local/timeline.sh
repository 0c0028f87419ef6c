#!/bin/bash
# Trains the CNN for one epoch and writes timeline.json on this machine.
# From the checkout: bash jobs/local/timeline.sh

cd "$(dirname "$0")/../.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 2 --timeline timeline.json -- python examples/pytorch/cnn.py --epochs 1
