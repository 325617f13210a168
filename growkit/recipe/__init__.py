"""Recipes: operations on a checkpoint, as Python objects or as strict YAML."""
