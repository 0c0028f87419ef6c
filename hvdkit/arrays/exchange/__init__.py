"""How arrays travel: packed into buffers by a plan, through shared memory on a host, to and from GPUs, as half."""
