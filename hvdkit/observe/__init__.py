"""What watches a training: the monitor and its history, stragglers, trackers, the profiler, and what marks steps."""
