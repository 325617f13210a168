"""What a user did wrong."""


class InputError(ValueError):
    """Bad input: a sentence that names the file, tensor or key, and the way out (exit code 2)."""
