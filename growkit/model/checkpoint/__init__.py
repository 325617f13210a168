"""Checkpoints on disk: read lazily, written streamed, published when proved."""
