#!/bin/bash
#SBATCH --job-name=cnn-scaling
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --cpus-per-task=4
#SBATCH --time=00:30:00
#SBATCH --output=%x.%j.log
# Trains the CNN for one epoch on 1 to 8 ranks, three times each, and says how it scales (scaling.json, this log)
# under Slurm: 2 hosts, 4 ranks each.
# From the checkout: sbatch jobs/slurm/scaling.sh

cd "$SLURM_SUBMIT_DIR" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

# Submitted again after the time was up, it goes on where it was.
hvdkit bench scaling -n 1,2,4,8 --repeats 3 --ppn 4 --depth 4 --launcher srun -o scaling.json -- python examples/pytorch/cnn.py --epochs 1
