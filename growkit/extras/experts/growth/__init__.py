"""Growth methods for experts, one file each: ``OPERATION``."""
