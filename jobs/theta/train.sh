#!/bin/bash -l
#COBALT --jobname cnn-train
#COBALT -n 2
#COBALT -t 00:30:00
#COBALT -q debug-cache-quad
#COBALT --attrs filesystems=home,theta-fs0
#COBALT -O cnn-train
# Trains the CNN on Theta (Cobalt, aprun): 2 hosts of 64 cores.
# From the checkout: qsub -A ACCOUNT jobs/theta/train.sh

module load conda
conda activate
# Cobalt starts a script in the directory from which it was submitted.
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 8 --ppn 4 --depth 16 --launcher aprun --restarts 1 -- python examples/pytorch/cnn.py --checkpoint_dir runs/cnn --resume
