"""The proof: two model folders compute the same function, shown with transformers itself."""
