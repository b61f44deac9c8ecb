"""From rollouts, or from conversations in a file, to rows the trainer takes. Begin at `rows` and `turns`."""
