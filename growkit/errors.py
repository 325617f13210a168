"""What a user did wrong."""


class InputError(ValueError):
    """Bad input: a sentence that names the file, tensor or key, and the way out (exit code 2)."""


def reason(error: BaseException) -> str:
    """The first line of another library's error, to be quoted in a sentence of ours."""
    return (str(error).strip() or type(error).__name__).splitlines()[0].rstrip(".")
