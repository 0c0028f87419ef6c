#!/bin/bash
#SBATCH --job-name=cnn-scaling
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --output=%x.%j.log
# Trains the CNN for one epoch on growing numbers of ranks (then: grep images/s scaling.*.log) under Slurm: 2 hosts, 4 ranks each.
# From the checkout: sbatch jobs/slurm/scaling.sh

cd "$SLURM_SUBMIT_DIR" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 1 --ppn 1 --depth 4 --launcher srun -- python examples/pytorch/cnn.py --epochs 1 > scaling.1.log 2>&1 || exit
hvdkit launch -n 2 --ppn 2 --depth 4 --launcher srun -- python examples/pytorch/cnn.py --epochs 1 > scaling.2.log 2>&1 || exit
hvdkit launch -n 4 --ppn 4 --depth 4 --launcher srun -- python examples/pytorch/cnn.py --epochs 1 > scaling.4.log 2>&1 || exit
hvdkit launch -n 8 --ppn 4 --depth 4 --launcher srun -- python examples/pytorch/cnn.py --epochs 1 > scaling.8.log 2>&1 || exit
