"""What the tools share: command groups, files, JSON, units, tables, plots, intervals, and programs."""
