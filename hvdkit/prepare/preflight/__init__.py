"""Looks at every rank of a job before it trains: do they see each other, the same versions, devices of their own?

A room beside ``doctor/``, which looks at one machine without a job. ``report`` is what a rank says of itself,
``exchange`` brings the reports together, ``findings`` compares them, without processes, and ``cli`` shows the result.
"""
