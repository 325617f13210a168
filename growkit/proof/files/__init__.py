"""The files beside the weights: config, tokenizer, generation settings and code."""
