"""What a user did wrong."""

LONGEST_QUOTE = 240


class InputError(ValueError):
    """Bad input: a sentence that names the file, tensor or key, and the way out (exit code 2)."""


def reason(error: BaseException) -> str:
    """Another library's error on one line, to be quoted in a sentence of ours."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:LONGEST_QUOTE].rstrip(".")
