"""What others grow, rebuilt by hand; and models of which growkit knows nothing but their logits."""
