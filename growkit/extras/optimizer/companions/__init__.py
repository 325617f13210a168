"""Files of optimizers that grow with a model."""
