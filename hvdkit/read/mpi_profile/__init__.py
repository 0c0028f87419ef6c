"""Reads records of what MPI did on every rank: ours (``hvdkit launch --mpi-profile``) and IBM mpitrace's."""
