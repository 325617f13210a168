"""Models: their family as data, their files, and both as one value."""
