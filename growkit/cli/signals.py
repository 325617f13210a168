"""How signals end the command, from its first import on; nothing but the smallest is imported here.

Until a command begins nothing has been made that could be left behind, so that the process ends
where it stands: an exception would go through the imports of others, who may swallow or print it.
"""

import os
import signal
import sys

INTERRUPTED = "interrupted: nothing half-written is left"


def heed_signals() -> None:
    """Let interrupts and the like end the process at once, as long as no command has begun."""
    for signum in _heeded():
        if signal.getsignal(signum) is not signal.SIG_IGN:  # nohup and & ignore some
            signal.signal(signum, _stop)


def begin_command() -> None:
    """From here on they end a command, which cleans up behind it."""
    for signum in _heeded():
        if signal.getsignal(signum) is _stop:
            signal.signal(signum, _interrupt if signum == signal.SIGINT else _terminate)


def _heeded() -> list[int]:
    names = ("SIGINT", "SIGTERM", "SIGHUP")  # Windows has no SIGHUP
    return [getattr(signal, name) for name in names if hasattr(signal, name)]


def _stop(signum: int, frame: object) -> None:
    if signum == signal.SIGINT:
        try:  # noqa: SIM105 - to import contextlib takes longer than all the rest
            os.write(2, f"{INTERRUPTED}\n".encode())
        except OSError:  # the reader is gone
            pass
    os._exit(128 + signum)


def _interrupt(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)  # once is enough: cleaning up is not to be disturbed
    raise KeyboardInterrupt


def _terminate(signum: int, frame: object) -> None:
    signal.signal(signum, signal.SIG_IGN)
    sys.exit(128 + signum)  # unwinds, so that nothing half-written stays
