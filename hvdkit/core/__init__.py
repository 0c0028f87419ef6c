"""How gradients travel, for every framework binding alike; imports no framework.

``layout`` says what lies where, and what ranks say beside their gradients; ``communicator`` has the collectives of
everything else: arrays of the host, over Horovod or mpi4py; ``listeners`` are told how far a step is.
"""
