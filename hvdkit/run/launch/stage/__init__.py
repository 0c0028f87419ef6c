"""``hvdkit launch --stage``: the environment copied to the local disk of every host before the ranks start.

::

    job ── (environment)            what is staged and where, and the short job that does it: one worker on each host
    worker ── (archive, store)      over MPI: who lacks it, the archive to all of these at once, unpacked as it comes
                archive             the stream: packed on one host, unpacked on the others, never a file
                store               a host's directory: what it has, its room, what nobody uses any more

It is a room of its own because its worker runs on the hosts and needs nothing else of ``launch``.
"""
