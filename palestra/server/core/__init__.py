"""The base of every protocol: requests and their order, samples, workers, checkpoints, sessions. No HTTP.

Begin at `training` (training requests) and `sampling` (samples).
"""
