"""Code for the Python that has verifiers: it imports the standard library and verifiers only."""
