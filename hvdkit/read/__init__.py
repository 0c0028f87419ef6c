"""What happened: recordings of Horovod, of PyTorch's profiler and of MPI, read and explained."""
