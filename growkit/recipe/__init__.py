"""Recipes: what to do to a checkpoint, as Python objects or as strict YAML."""
