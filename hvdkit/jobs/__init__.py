"""A job: start it, write its batch script, find settings that make it fast."""
