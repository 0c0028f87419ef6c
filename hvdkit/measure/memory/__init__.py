"""``hvdkit memory``: what a training needs in memory on every rank, term by term.

Why this room exists: plain data parallelism keeps the whole model on every rank, so that more ranks never make it fit;
whether a model fits is asked before an allocation is spent on finding out.
"""
