"""Pictures of requests: found, decoded in a process of their own, and given their places in prompts. Begin at
`reader`."""
