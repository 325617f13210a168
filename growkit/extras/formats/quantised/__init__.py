"""One file per format of quantised weights; each defines ``FORMAT``."""
