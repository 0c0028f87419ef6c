"""Horovod's synthetic benchmark for every framework: random data, one model, images or sentences per second."""
