#!/bin/bash
# Trains the CNN for one epoch on growing numbers of ranks (then: grep images/s scaling.*.log) on this machine.
# From the checkout: bash jobs/local/scaling.sh

cd "$(dirname "$0")/../.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 1 -- python examples/pytorch/cnn.py --epochs 1 > scaling.1.log 2>&1 || exit
hvdkit launch -n 2 -- python examples/pytorch/cnn.py --epochs 1 > scaling.2.log 2>&1 || exit
