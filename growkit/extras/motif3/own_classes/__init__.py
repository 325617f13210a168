"""How models run as those of a class of growkit's own, one file each: ``OWN_CLASS``."""
