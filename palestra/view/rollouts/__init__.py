"""Rollouts: listed, filtered, one with its tokens. Begin at `rollout_pages`."""
