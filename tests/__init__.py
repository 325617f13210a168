"""The tests of growkit, of which ``pytest --all`` runs every case."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # tests ask nobody, nor do the commands that they start
