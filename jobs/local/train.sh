#!/bin/bash
# Trains the CNN on this machine.
# From the checkout: bash jobs/local/train.sh

cd "$(dirname "$0")/../.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 2 --restarts 1 -- python examples/pytorch/cnn.py --checkpoint_dir runs/cnn --resume
