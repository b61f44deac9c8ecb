"""The groups that a step plays: their order, refills, staleness, difficulty."""
