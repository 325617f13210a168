"""What growing is worth on one's own model: candidates are grown, trained alike and ranked."""
