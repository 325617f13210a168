"""Growth methods, one file each: it defines ``OPERATION``, and being here registers it."""
