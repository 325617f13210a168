"""What loads a grown model: growth meanwhile, and the check before its training begins."""
