"""The Tinker API: wire formats, routes, ids. Begin at `service` and the `routes_*`."""
