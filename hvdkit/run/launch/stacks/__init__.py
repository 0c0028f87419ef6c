"""The directory that ``hvdkit launch`` puts first on PYTHONPATH, for the ``sitecustomize`` in it."""
