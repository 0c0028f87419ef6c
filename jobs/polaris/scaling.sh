#!/bin/bash -l
#PBS -N cnn-scaling
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:eagle
#PBS -q debug
#PBS -j oe
# Trains the CNN for one epoch on 1 to 8 ranks, three times each, and says how it scales (scaling.json, this log)
# on Polaris (PBS, PALS's mpiexec): 2 hosts of 4 GPUs.
# From the checkout: qsub -A ACCOUNT jobs/polaris/scaling.sh

module use /soft/modulefiles
module load conda
conda activate base
cd "$PBS_O_WORKDIR" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

# Submitted again after the time was up, it goes on where it was.
hvdkit bench scaling -n 1,2,4,8 --repeats 3 --ppn 4 --depth 8 --launcher mpiexec -o scaling.json -- python examples/pytorch/cnn.py --epochs 1
