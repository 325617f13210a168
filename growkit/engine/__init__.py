"""The engine: a model of transformers run one layer at a time, in any dtype, out of its files."""
