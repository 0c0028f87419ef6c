"""Two recordings or results of one kind side by side: what a step took before and after, and what explains the change.

Why this room exists: timelines, traces, profiles, times of steps and results of measurements answer the same question,
"what changed?", with the same arithmetic and in the same table.

What each module is for: ``sides`` recordings and results to times, ``comparison`` two of these to changes, ``cli`` the
command and what it prints.
"""
