"""Checkpoints, snapshots and adapters: on disk, in object storage, on their way to replicas. Begin at `files`."""
