"""What every room uses: errors, names, units, strict parsing, progress."""
