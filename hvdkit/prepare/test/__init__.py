"""Trains on two ranks here, in every framework found: ``cli.py`` starts ``hvdkit.synthetic.smoke`` and reads it."""
