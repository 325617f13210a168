"""What a class of transformers says of its tensors, for families that growkit does not know."""
