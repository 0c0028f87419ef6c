#!/bin/bash
#SBATCH --job-name=cnn-train
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --output=%x.%j.log
# Trains the CNN under Slurm: 2 hosts, 4 ranks each.
# From the checkout: sbatch jobs/slurm/train.sh

cd "$SLURM_SUBMIT_DIR" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 8 --ppn 4 --depth 4 --launcher srun --restarts 1 -- python examples/pytorch/cnn.py --checkpoint_dir runs/cnn --resume
