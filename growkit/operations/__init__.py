"""What is done to a model: growth methods and conversions, one file each."""
