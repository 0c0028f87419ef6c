#!/bin/bash -l
#PBS -N cnn-profile
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:eagle
#PBS -q debug
#PBS -j oe
# Trains the CNN for one epoch and profiles some of its steps (profile/) on Polaris (PBS, PALS's mpiexec): 2 hosts of 4 GPUs.
# From the checkout: qsub -A ACCOUNT jobs/polaris/profile.sh

module use /soft/modulefiles
module load conda
conda activate base
cd "$PBS_O_WORKDIR" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 8 --ppn 4 --depth 8 --launcher mpiexec --torch-profile profile -- python examples/pytorch/cnn.py --epochs 1
