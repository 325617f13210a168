"""Growth methods of differential attention."""
