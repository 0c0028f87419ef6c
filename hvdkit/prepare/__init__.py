"""Before a job: install Horovod, look at what is installed, read a script, look at a job's ranks."""
