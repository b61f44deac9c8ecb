"""The Tinker API: wire forms, routes, ids. Begin at `service` and the `routes_*`."""
