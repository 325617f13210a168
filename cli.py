"""Run growkit from a checkout: ``python cli.py --help``."""

from growkit.cli import main

main()
