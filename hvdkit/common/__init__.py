"""What the tools share: command groups, files, units, extras, tables, plots, pages, intervals,
signals, and how programs are asked; and the Keras optimizer.

The Keras optimizer stands here since both ``hvdkit.keras`` and ``hvdkit.tensorflow`` stand on it.
"""
