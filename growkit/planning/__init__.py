"""Plans: how target tensors are made from source tensors, from headers alone."""
