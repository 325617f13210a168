"""Results of inspections and of plans."""
