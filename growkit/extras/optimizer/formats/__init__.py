"""One file per format in which engines save an optimizer's state; each defines ``FORMAT``."""
