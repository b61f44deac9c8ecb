"""Environments of the `verifiers` package, played by verifiers itself in a process of their own."""
