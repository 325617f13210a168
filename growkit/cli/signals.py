"""Signal handling from the first import on. Few imports, so that Ctrl-C works early.

Before a command begins there is nothing to clean up, so the process ends at once. An exception
would pass through third-party imports, which may swallow or print it.
"""

import os
import signal
import sys

INTERRUPTED = "interrupted: nothing half-written is left"


_command_begun = False


def heed_signals() -> None:
    """Let interrupts and the like end the process at once, as long as no command has begun."""
    for name in ("SIGINT", "SIGTERM", "SIGHUP"):  # Windows has no SIGHUP
        signum = getattr(signal, name, None)
        if signum and signal.getsignal(signum) is not signal.SIG_IGN:  # nohup and & ignore some
            signal.signal(signum, _end)


def begin_command() -> None:
    """Let signals raise from now on, so that the command cleans up."""
    global _command_begun
    _command_begun = True


def _end(signum: int, frame: object) -> None:
    if not _command_begun:
        if signum == signal.SIGINT:
            try:  # noqa: SIM105 - to import contextlib takes longer than all the rest
                os.write(2, f"{INTERRUPTED}\n".encode())
            except OSError:  # nobody listens
                pass
        os._exit(128 + signum)
    signal.signal(signum, signal.SIG_IGN)  # once is enough: cleaning up is not to be disturbed
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + signum)  # unwinds, so that nothing half-written stays
