"""The tests of growkit, and sweeps that run by hand: ``python -m tests.NAME``."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # tests ask nobody, nor do the commands that they start
