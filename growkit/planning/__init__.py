"""Plans: what is made of which tensors, known from headers alone."""
