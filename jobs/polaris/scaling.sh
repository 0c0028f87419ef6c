#!/bin/bash -l
#PBS -N cnn-scaling
#PBS -l select=2:system=polaris
#PBS -l place=scatter
#PBS -l walltime=00:30:00
#PBS -l filesystems=home:eagle
#PBS -q debug
#PBS -j oe
# Trains the CNN for one epoch on growing numbers of ranks (then: grep images/s scaling.*.log) on Polaris (PBS, PALS's mpiexec): 2 hosts of 4 GPUs.
# From the checkout: qsub -A ACCOUNT jobs/polaris/scaling.sh

module use /soft/modulefiles
module load conda
conda activate base
cd "$PBS_O_WORKDIR" || exit 1
export PATH="$PWD/.venv/bin:$PATH"  # where make puts hvdkit

hvdkit launch -n 1 --ppn 1 --depth 8 --launcher mpiexec -- python examples/pytorch/cnn.py --epochs 1 > scaling.1.log 2>&1 || exit
hvdkit launch -n 2 --ppn 2 --depth 8 --launcher mpiexec -- python examples/pytorch/cnn.py --epochs 1 > scaling.2.log 2>&1 || exit
hvdkit launch -n 4 --ppn 4 --depth 8 --launcher mpiexec -- python examples/pytorch/cnn.py --epochs 1 > scaling.4.log 2>&1 || exit
hvdkit launch -n 8 --ppn 4 --depth 8 --launcher mpiexec -- python examples/pytorch/cnn.py --epochs 1 > scaling.8.log 2>&1 || exit
