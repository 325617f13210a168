"""The command line."""

import gc

# Torch and transformers make half a million objects that stay. Looking for garbage among them takes
# a tenth of the time of their imports, and of a proof.
gc.set_threshold(1_000_000)
