"""The ``growkit`` command and ``python -m growkit``: signals are handled first."""

from growkit.cli.signals import heed_signals


def main() -> None:
    """See ``growkit.cli.app.main``."""
    heed_signals()
    from growkit.cli.app import main as run  # takes most of a second

    run()


if __name__ == "__main__":
    main()
