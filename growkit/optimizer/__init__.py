"""An optimizer's state, grown beside the weights: what training learned of its own steps."""
