"""``hvdkit watch``: a job while it trains, from the files that its monitor writes, on any host that sees them."""
