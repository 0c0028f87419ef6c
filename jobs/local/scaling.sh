#!/bin/bash
# Trains the CNN for one epoch on 1 and 2 ranks, three times each, and says how it scales, on this machine (scaling.json).
# From the checkout: bash jobs/local/scaling.sh

cd "$(dirname "$0")/../.." || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit bench scaling -n 1,2 --repeats 3 -o scaling.json -- python examples/pytorch/cnn.py --epochs 1
