"""Samplers beside the worker that trains: processes of our own engine, here and elsewhere, or vLLM. Begin at
`runner`."""
