"""What operations and proofs report: as objects, as JSON and in sentences."""
