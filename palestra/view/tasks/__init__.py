"""Tasks that people play in the browser. Begin at `platform_routes`."""
