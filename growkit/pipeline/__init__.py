"""From a request to a published checkpoint: plan, write, prove, publish."""
