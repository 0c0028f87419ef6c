"""``hvdkit watch``: a job while it trains, from the files that its monitor writes.

Why this room exists: who looks at a job needs no access to it, only to its directory, from any host and at any time.
"""
