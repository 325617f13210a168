"""Growth of mixtures of experts: more experts, and dense models that become such."""
