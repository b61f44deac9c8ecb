"""Run folders: what a training run leaves on disk, written and read by the same code.

Trainers write through `writer.RunFolder`; commands and pages read through `reader`. No torch, no HTTP, no database.
"""
