"""Several processes that work as one engine worker: rank 0 decides and answers, the others follow. Begin at
`group_backend`."""
