"""Growth in depth: new layers, and repeated ones."""
