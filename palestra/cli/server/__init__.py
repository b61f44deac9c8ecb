"""Commands of a server: serve, keys, quotas, usage, aliases, backups, replicas. Begin at `serve`."""
