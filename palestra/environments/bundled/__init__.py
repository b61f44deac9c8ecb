"""Environments that are part of Palestra: small enough for the bundled model, and needing nothing but Python."""
