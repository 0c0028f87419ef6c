"""``hvdkit tune``: the settings that make one job fast here, found by running it many times."""
