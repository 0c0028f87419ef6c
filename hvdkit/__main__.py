"""``python -m hvdkit``: the command line."""

from hvdkit.cli import main

main()
