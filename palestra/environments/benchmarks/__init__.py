"""Benchmarks by their names: where their files are, how they are asked, who grades. Begin at `catalogue`."""
