"""The ``growkit`` command and ``python -m growkit``: signals are heeded before all else."""

from growkit.signals import heed_signals


def main() -> None:
    """See ``growkit.cli.main``."""
    heed_signals()
    from growkit.cli import main as run  # takes most of a second

    run()


if __name__ == "__main__":
    main()
