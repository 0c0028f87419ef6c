"""Trains on two ranks here, in every framework found: the start is the doctor's (``doctor.two_ranks``)."""
