"""The episode API over HTTP, on the broker. Begin at `player_routes` (who plays) and `routes` (who trains)."""
