"""Where models come from: one file for every kind of source."""
