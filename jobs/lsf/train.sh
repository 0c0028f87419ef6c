#!/bin/bash
#BSUB -J cnn-train
#BSUB -nnodes 2
#BSUB -W 00:30
#BSUB -o cnn-train.%J.log
# Trains the CNN under LSF with jsrun (Summit and its like): 2 hosts, 4 ranks each with a GPU.
# From the checkout: bsub -P ACCOUNT < jobs/lsf/train.sh

cd "$LS_SUBCWD" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 8 --ppn 4 --depth 7 --launcher jsrun --gpus-per-node 4 --restarts 1 -- python examples/pytorch/cnn.py --checkpoint_dir runs/cnn --resume
