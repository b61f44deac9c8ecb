"""NeMo Gym's commands as names for Palestra's: `gym`, `ng` and the `ng_*` names."""
