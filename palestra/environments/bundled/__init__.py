"""Environments that come with Palestra: small enough for the bundled model, and needing nothing but Python."""
