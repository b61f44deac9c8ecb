"""Anthropic's Messages API in front of the model endpoint. Begin at `routes`."""
