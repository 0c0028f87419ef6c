"""What the tools share: command groups, files, units, extras, tables, plots, intervals, causes, and programs."""
