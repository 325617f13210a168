"""Check of a folder against the sizes and hashes in its manifest, at any later time."""
