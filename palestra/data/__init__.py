"""Datasets: rows of JSONL, Parquet and cached hub datasets, and the forms that training reads. Begin at `rows` and
`conversations`."""
