"""Growth methods, one file each."""
