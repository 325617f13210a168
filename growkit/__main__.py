"""The ``growkit`` command and ``python -m growkit``. Signals are handled first."""

import gc

from growkit.cli.signals import handle_signals


def main() -> None:
    """See ``growkit.cli.app.run_app``."""
    handle_signals()
    # Imported objects stay alive: scanning them again and again takes 0.4 s (measured).
    gc.set_threshold(10_000)
    from growkit.cli.app import run_app  # takes most of a second

    run_app()


if __name__ == "__main__":
    main()
