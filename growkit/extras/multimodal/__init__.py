"""Language models inside multimodal ones, without their towers and projectors."""
