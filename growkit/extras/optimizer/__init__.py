"""An optimizer's state, grown with the weights."""
