#!/bin/bash -l
#COBALT --jobname cnn-scaling
#COBALT -n 2
#COBALT -t 00:30:00
#COBALT -q debug-cache-quad
#COBALT --attrs filesystems=home,theta-fs0
#COBALT -O cnn-scaling
# Trains the CNN for one epoch on growing numbers of ranks (then: grep images/s scaling.*.log) on Theta (Cobalt, aprun): 2 hosts of 64 cores.
# From the checkout: qsub -A ACCOUNT jobs/theta/scaling.sh

module load conda
conda activate
# Cobalt starts a script in the directory from which it was submitted.
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 1 --ppn 1 --depth 64 --launcher aprun -- python examples/pytorch/cnn.py --epochs 1 > scaling.1.log 2>&1 || exit
hvdkit launch -n 2 --ppn 2 --depth 32 --launcher aprun -- python examples/pytorch/cnn.py --epochs 1 > scaling.2.log 2>&1 || exit
hvdkit launch -n 4 --ppn 4 --depth 16 --launcher aprun -- python examples/pytorch/cnn.py --epochs 1 > scaling.4.log 2>&1 || exit
hvdkit launch -n 8 --ppn 4 --depth 16 --launcher aprun -- python examples/pytorch/cnn.py --epochs 1 > scaling.8.log 2>&1 || exit
