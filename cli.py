"""Run growkit from a checkout: ``python cli.py --help``."""

from growkit.cli.app import main

main()
