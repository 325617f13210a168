"""Models on the Hub of Hugging Face, and in its cache."""
