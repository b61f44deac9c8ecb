"""Owners: who calls, what they may use, what they have used. Begin at `callers` and `quotas`."""
