"""The engine worker: one process that trains and samples many adapters on one base model. Begin at `worker`."""
