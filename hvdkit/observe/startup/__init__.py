"""The directory that is put first on a rank's PYTHONPATH, for the ``sitecustomize`` in it."""
