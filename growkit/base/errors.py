"""Errors for users, and escaping of untrusted text for display."""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_QUOTE = 240
LONGEST_SENTENCE = 2000


class InputError(ValueError):
    """Bad input: a sentence that names the file, tensor or key, and the remedy (exit code 2).

    The sentence may quote untrusted names and values, so ``plain`` escapes it.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(plain(shortened(sentence)))


class PlaceError(InputError):
    """There is no place for the output, or for temporary files."""


def reason(error: BaseException) -> str:
    """Shorten another library's error to one line, to quote it in a message."""
    return (" ".join(str(error).split()) or type(error).__name__)[:LONGEST_QUOTE].rstrip(".")


@contextmanager
def foreign(failure: str, remedy: str) -> Iterator[None]:
    """Turn exceptions of another library into an ``InputError``, except Ctrl-C and lack of memory.

    Args:
        failure: the beginning of the message, for example "transformers cannot load FOLDER".
        remedy: the end of the message: how to fix it.

    Raises:
        InputError: the library raised an exception.
    """
    try:
        yield
    except (InputError, KeyboardInterrupt, SystemExit, GeneratorExit, MemoryError):
        raise
    except BaseException as error:
        kind = type(error).__name__
        if kind == "OutOfMemoryError":  # of torch, which commands import late
            raise
        raise InputError(f"{failure} ({kind}: {reason(error)}); {remedy}") from error


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
