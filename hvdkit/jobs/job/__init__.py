"""Batch scripts for PBS, Slurm and LSF, and MPIJobs for Kubernetes.

It starts nothing and shares with ``launch`` only the command line that it writes: a script runs elsewhere.
"""
