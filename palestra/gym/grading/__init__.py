"""Parts that graders share: programs of models in a sandbox, patterns that may never end. Begin at `programs`."""
