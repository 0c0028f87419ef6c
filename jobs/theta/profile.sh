#!/bin/bash -l
#COBALT --jobname cnn-profile
#COBALT -n 2
#COBALT -t 00:30:00
#COBALT -q debug-cache-quad
#COBALT --attrs filesystems=home,theta-fs0
#COBALT -O cnn-profile
# Trains the CNN for one epoch and profiles some of its steps (profile/) on Theta (Cobalt, aprun): 2 hosts of 64 cores.
# From the checkout: qsub -A ACCOUNT jobs/theta/profile.sh

module load conda
conda activate
# Cobalt starts a script in the directory from which it was submitted.
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 8 --ppn 4 --depth 16 --launcher aprun --torch-profile profile -- python examples/pytorch/cnn.py --epochs 1
