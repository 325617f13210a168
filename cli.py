"""Run growkit from a checkout: ``python cli.py --help``."""

from growkit.cli.commands import run_app

run_app()
