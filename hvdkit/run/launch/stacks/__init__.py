"""The directory that ``hvdkit launch --stall-timeout`` puts first on PYTHONPATH, for the ``sitecustomize`` in it."""
