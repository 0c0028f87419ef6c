"""A user's own model from ``MODULE:FACTORY``, made in a process of its own.

Why this room exists: ``hvdkit emulate`` asks a model for its gradients and ``hvdkit memory`` for what it keeps; neither
may load a framework where the command line runs, nor run the user's module there.
"""
