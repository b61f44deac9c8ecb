"""The base of every protocol: requests and their order, samples, workers, checkpoints, sessions. No HTTP.

A room for each part; begin at `training` and `samples`. `server/services` puts the parts together.
"""
