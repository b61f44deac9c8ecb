"""The pages of sweeps: what one has found, live, and its runs."""
