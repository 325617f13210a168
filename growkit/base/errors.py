"""Errors for users, and escaping of untrusted text for display."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LONGEST_QUOTE = 240
LONGEST_SENTENCE = 2000

DISK = frozenset(
    {errno.EIO, errno.ENXIO, errno.ENODEV, errno.EFBIG, errno.ENOSPC, errno.EROFS, errno.ESTALE}
    | {errno.EDQUOT, errno.EINTR, errno.EMFILE, errno.ENFILE, errno.ENOMEM}
)
"""Numbers of errors of the system that say nothing about a file's contents."""

NUMBER = re.compile(r"(\d{1,3})[)\]]")
"""The number of an error of the system in a library's message, such as ``(os error 28)``."""


class InputError(ValueError):
    """Bad input: a sentence that names the file, tensor or key, and the remedy (exit code 2).

    The sentence may quote untrusted names and values, so ``plain`` escapes it.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(plain(shortened(sentence)))


faults: ContextVar[list["PlaceError"] | None] = ContextVar("faults", default=None)
"""Every ``PlaceError`` in the block of ``growkit.model.checkpoint.scratch.report_faults``."""


class PlaceError(InputError):
    """The disk of a model, of the output or of temporary files has a fault: no model is at fault.

    It ends a run or a proof, also if something catches it.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(sentence)
        if (known := faults.get()) is not None:
            known.append(self)


def reason(error: BaseException) -> str:
    """Shorten another library's error to one line, to quote it in a message."""
    return (" ".join(str(error).split()) or type(error).__name__)[:LONGEST_QUOTE].rstrip(".")


def system_error(error: BaseException) -> tuple[BaseException, int] | None:
    """The first error of the system that led to an error, and its number; None if there is none.

    Missing files do not count, since classes may look for files that a model does not have.
    """
    cause: BaseException | None = error
    while cause is not None:
        number = cause.errno if isinstance(cause, OSError) else None
        if number is None and not isinstance(cause, InputError):  # which quotes its cause
            told = map(int, NUMBER.findall(str(cause)))
            number = next((number for number in told if os.strerror(number) in str(cause)), None)
        if number and number != errno.ENOENT:
            return cause, number
        cause = cause.__cause__ or cause.__context__
    return None


@contextmanager
def foreign(failure: str, remedy: str) -> Iterator[None]:
    """Turn exceptions of another library into an ``InputError``, except Ctrl-C and lack of memory.

    Args:
        failure: the beginning of the message, for example "transformers cannot load FOLDER".
        remedy: the end of the message: how to fix it.

    Raises:
        InputError: the library raised an exception.
        PlaceError: it did because of an error of the system.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError":  # of torch, which commands import late
            raise
        if (of_system := system_error(error)) and of_system[1] in DISK:
            remedy = (
                "the disk or the system failed, so no model is judged; run this again elsewhere"
            )
            raise PlaceError(f"{failure} ({kind}: {reason(error)}); {remedy}") from error
        raise InputError(f"{failure} ({kind}: {reason(error)}); {remedy}") from error


@contextmanager
def called(folder: object, name: str, prefix: str = "") -> Iterator[None]:
    """Give a temporary folder another name in errors, since users never find it.

    Args:
        folder: path of the folder.
        name: its name in messages.
        prefix: what stands before the names of its files.
    """
    try:
        yield
    except InputError as error:
        error.args = (renamed(str(error), folder, name, prefix),)
        raise


def renamed(text: str, folder: object, name: str, prefix: str) -> str:
    """A text with another name of a folder; see ``called``."""
    return text.replace(f"{folder}/", prefix).replace(str(folder), name)


def shortened(text: str, longest: int = LONGEST_SENTENCE) -> str:
    """Shorten a long text to its beginning and its end."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} […] {text[-half:]}"


def plain(text: str, keep: str = "") -> str:
    r"""Escape the characters that control a terminal, as in ``\x1b``.

    Only letters, marks, digits, signs and the space are kept. Control characters, line breaks,
    changes of the writing direction and lone surrogates are escaped.

    Args:
        text: any text.
        keep: characters to leave unescaped.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )
