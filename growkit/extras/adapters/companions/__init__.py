"""Files of adapters that grow with a model."""
