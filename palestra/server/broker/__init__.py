"""The episode broker inside the server: leases, claims, deliveries. No HTTP. Begin at `service`, then `broker`."""
