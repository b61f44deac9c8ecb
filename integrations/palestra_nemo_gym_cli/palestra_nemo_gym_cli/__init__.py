"""NeMo Gym's commands as faces of Palestra's: `gym`, `ng` and the `ng_*` names."""
