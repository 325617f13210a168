"""The ``growkit`` command and ``python -m growkit``. Signals are handled first."""

from growkit.cli.signals import handle_signals


def main() -> None:
    """See ``growkit.cli.commands.run_app``."""
    handle_signals()
    from growkit.cli.commands import run_app  # takes most of a second

    run_app()


if __name__ == "__main__":
    main()
