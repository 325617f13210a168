"""Errors of users, and untrusted text as it may be shown."""

from collections.abc import Iterator
from contextlib import contextmanager

LONGEST_QUOTE = 240
LONGEST_SENTENCE = 2000


class InputError(ValueError):
    """Bad input: a sentence that names the file, tensor or key, and the way out (exit code 2).

    It quotes names and values of untrusted folders, so it is made ``plain`` here.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(plain(shortened(sentence)))


class PlaceError(InputError):
    """The output cannot be written to its place."""


def reason(error: BaseException) -> str:
    """Another library's error on one line, to be quoted in a sentence of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:LONGEST_QUOTE].rstrip(".")


@contextmanager
def foreign(failure: str, remedy: str) -> Iterator[None]:
    """Turn errors of another library into a sentence, except Ctrl-C and lack of memory.

    Args:
        failure: what it could not do.
        remedy: what to do about that.

    Raises:
        InputError: something was raised.
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
    """A text of bounded length: of a longer one, the beginning and the end."""
    if len(text) <= longest:
        return text
    half = longest // 2
    return f"{text[:half]} […] {text[-half:]}"


def plain(text: str, keep: str = "") -> str:
    r"""A text that a terminal shows as it is: what steers one is escaped, as in ``\x1b``.

    That is everything but letters, marks, digits, signs and the space: control characters, line
    breaks, changes of the direction of writing, half of a surrogate pair.

    Args:
        text: anything.
        keep: characters that stay as they are.
    """
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else char.encode("unicode_escape").decode()
        for char in text
    )
