"""Results of probes, and the sentences on them."""
