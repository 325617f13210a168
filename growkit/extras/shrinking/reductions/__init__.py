"""Ways to make a model smaller; each is a file with ``OPERATION``, as a growth method is."""
