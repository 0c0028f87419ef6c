#!/bin/bash -l
#COBALT --jobname cnn-scaling
#COBALT -n 2
#COBALT -t 00:30:00
#COBALT -q debug-cache-quad
#COBALT --attrs filesystems=home,theta-fs0
#COBALT -O cnn-scaling
# Trains the CNN for one epoch on 1 to 8 ranks, three times each, and says how it scales (scaling.json, this log)
# on Theta (Cobalt, aprun): 2 hosts of 64 cores.
# From the checkout: qsub -A ACCOUNT jobs/theta/scaling.sh

module load conda
conda activate
# Cobalt starts a script in the directory from which it was submitted.
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

# Submitted again after the time was up, it goes on where it was.
hvdkit bench scaling -n 1,2,4,8 --repeats 3 --ppn 4 --depth 16 --launcher aprun -o scaling.json -- python examples/pytorch/cnn.py --epochs 1
