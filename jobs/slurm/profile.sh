#!/bin/bash
#SBATCH --job-name=cnn-profile
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --output=%x.%j.log
# Trains the CNN for one epoch and profiles some of its steps (profile/) under Slurm: 2 hosts, 4 ranks each.
# From the checkout: sbatch jobs/slurm/profile.sh

cd "$SLURM_SUBMIT_DIR" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 8 --ppn 4 --depth 4 --launcher srun --torch-profile profile -- python examples/pytorch/cnn.py --epochs 1
