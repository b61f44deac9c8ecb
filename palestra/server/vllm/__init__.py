"""vLLM as the sampler of a served model; training stays in our worker. Begin at `runner`."""
