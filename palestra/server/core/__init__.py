"""The base of every protocol: requests and their order, samples, workers, checkpoints, sessions. No HTTP.

Begin at `training` (the way of a training request) and `sampling` (the way of a sample).
"""
