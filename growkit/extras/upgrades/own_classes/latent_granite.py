"""Granite with multi-head latent attention."""

from growkit.extras.upgrades.modeling import own_class

OWN_CLASS = own_class("latent_granite", "LatentGranite")
