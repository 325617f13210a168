"""Results for readers: on the terminal, as pages, in model cards."""
