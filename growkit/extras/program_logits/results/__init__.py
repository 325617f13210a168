"""Results of comparing logits of other programs."""
