"""The journal of requests, in files or in the database. Begin at `journal`."""
