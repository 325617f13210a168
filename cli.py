"""Run growkit from a checkout: ``python cli.py --help``."""

from growkit.cli.app import run_app

run_app()
