"""``hvdkit plan``: what a training will do at each number of ranks, before a process is started.

Why this room exists: the numbers that tutorials have one work out by hand (steps per epoch, the global batch, the
scaled learning rate) come from the functions that the training itself calls, so that plan and training cannot differ.
"""
