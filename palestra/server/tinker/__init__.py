"""The Tinker API: wire forms, routes, ids."""
