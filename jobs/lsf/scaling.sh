#!/bin/bash
#BSUB -J cnn-scaling
#BSUB -nnodes 2
#BSUB -W 00:30
#BSUB -o cnn-scaling.%J.log
# Trains the CNN for one epoch on growing numbers of ranks (then: grep images/s scaling.*.log) under LSF with jsrun (Summit and its like): 2 hosts, 4 ranks each with a GPU.
# From the checkout: bsub -P ACCOUNT < jobs/lsf/scaling.sh
# (hvdkit bench scaling cannot ask jsrun for GPUs, so that each number of ranks is a job of its own here.)

cd "$LS_SUBCWD" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 1 --ppn 1 --depth 7 --launcher jsrun --gpus-per-node 1 -- python examples/pytorch/cnn.py --epochs 1 > scaling.1.log 2>&1 || exit
hvdkit launch -n 2 --ppn 2 --depth 7 --launcher jsrun --gpus-per-node 2 -- python examples/pytorch/cnn.py --epochs 1 > scaling.2.log 2>&1 || exit
hvdkit launch -n 4 --ppn 4 --depth 7 --launcher jsrun --gpus-per-node 4 -- python examples/pytorch/cnn.py --epochs 1 > scaling.4.log 2>&1 || exit
hvdkit launch -n 8 --ppn 4 --depth 7 --launcher jsrun --gpus-per-node 4 -- python examples/pytorch/cnn.py --epochs 1 > scaling.8.log 2>&1 || exit
