"""`palestra run` and `palestra rollout`: reading run folders. Begin at `commands`."""
