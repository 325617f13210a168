"""Results of inference."""
