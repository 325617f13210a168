"""Classes of growkit's own, one file each: it defines ``OWN_CLASS``."""
