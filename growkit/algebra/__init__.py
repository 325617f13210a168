"""The mathematics of growth: pure functions of tensors, no files, no models."""
