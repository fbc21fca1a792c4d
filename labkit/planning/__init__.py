"""Plans: the memory and the step time of each strategy for a model, a batch and a cluster, by formulas; data only."""
