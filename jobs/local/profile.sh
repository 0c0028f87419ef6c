#!/bin/bash
# Trains the CNN for one epoch and profiles some of its steps (profile/) on this machine.
# From the checkout: bash jobs/local/profile.sh

cd "$(dirname "$0")/../.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 2 --torch-profile profile -- python examples/pytorch/cnn.py --epochs 1
