"""Growth methods that add layers, one file each: ``OPERATION``."""
