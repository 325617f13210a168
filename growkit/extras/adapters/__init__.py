"""Adapters of PEFT, grown with the model that they adapt."""
