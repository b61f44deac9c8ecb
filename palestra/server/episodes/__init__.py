"""The episode API over HTTP, on the broker. Begin at `player_routes` (for players) and `routes` (for trainers)."""
