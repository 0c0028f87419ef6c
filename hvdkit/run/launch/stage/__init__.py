"""``hvdkit launch --stage``: the environment copied to the local disk of every host before the ranks start.

``job`` makes the short job that does it, one ``worker`` on each host: over MPI they find who lacks it, and the first
one sends it to all of these at once. ``copy`` is what an environment and its copy on a host are.
"""
