"""What runs in the Python that has verifiers: standard library and verifiers only."""
