"""Short jobs that are run to be timed: what ``tune``, ``bench`` and ``emulate`` share."""
