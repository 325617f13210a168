"""``python -m growkit``."""

from growkit.cli import main

main()
