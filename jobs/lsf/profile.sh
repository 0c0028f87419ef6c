#!/bin/bash
#BSUB -J cnn-profile
#BSUB -nnodes 2
#BSUB -W 00:30
#BSUB -o cnn-profile.%J.log
# Trains the CNN for one epoch and profiles some of its steps (profile/) under LSF with jsrun (Summit and its like): 2 hosts, 4 ranks each with a GPU.
# From the checkout: bsub -P ACCOUNT < jobs/lsf/profile.sh

cd "$LS_SUBCWD" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 8 --ppn 4 --depth 7 --launcher jsrun --gpus-per-node 4 --torch-profile profile -- python examples/pytorch/cnn.py --epochs 1
