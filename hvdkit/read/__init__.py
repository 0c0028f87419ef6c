"""What happened: recordings of the steps, of Horovod, of PyTorch's profiler and of MPI, read and explained."""
