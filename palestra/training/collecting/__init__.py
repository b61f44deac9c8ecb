"""Which groups a step plays: their order, refills, staleness, difficulty."""
