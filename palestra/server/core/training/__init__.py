"""Training requests: durable, in order, applied once; the models that they train. Begin at `requests`."""
