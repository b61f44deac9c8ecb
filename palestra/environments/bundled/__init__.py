"""Environments that are part of Palestra: small enough for the bundled model, and needing nothing but Python.

Their words are what Ephebe was taught: when they change, it must be trained again (`recipes/ephebe`). The same holds
for `ephebe-shell`, the shell agent's prompt and tool, and the words of `coding/warm_up`.
"""
