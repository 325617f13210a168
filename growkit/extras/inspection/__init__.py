"""What a model is, which operations it allows, and what a recipe costs; nothing is written."""
