"""Sweeps: populations of runs that differ in some settings and share one server.

`settings` makes the settings of the runs, `folder` has the sweep's files, `findings` says which setting is best. What
runs them is `palestra.training.sweep`. No torch, no HTTP, no database.
"""
