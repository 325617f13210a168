"""Signal handling from the first import on, with few imports, so that Ctrl-C works early.

Before a command begins there is nothing to clean up, so the process ends at once. An exception
would pass through third-party imports, which may swallow or print it.
"""

import os
import signal
import sys

INTERRUPTED = "interrupted: nothing half-written is left"


_command_begun = False


def handle_signals() -> None:
    """Let SIGINT, SIGTERM and SIGHUP end the process at once until a command begins."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup and & ignore some
            signal.signal(signum, _handle)


def begin_command() -> None:
    """Let signals raise exceptions from now on, so that the command cleans up."""
    global _command_begun
    _command_begun = True


def _handle(signum: int, frame: object) -> None:
    if not _command_begun:
        if signum == signal.SIGINT:
            try:  # noqa: SIM105 - importing contextlib takes longer than this whole module
                os.write(2, f"{INTERRUPTED}\n".encode())
            except OSError:  # stderr is closed
                pass
        os._exit(128 + signum)
    signal.signal(signum, signal.SIG_IGN)  # a second signal must not interrupt the clean-up
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    sys.exit(128 + signum)  # unwinds the stack, so that nothing half-written stays
