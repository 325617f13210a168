"""Llama with several residual streams."""

from growkit.extras.upgrades.modeling import own_class

OWN_CLASS = own_class("hyper_llama", "HyperLlama")
