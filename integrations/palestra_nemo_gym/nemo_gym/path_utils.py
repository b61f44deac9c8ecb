"""Names of the files beside a collection's output."""

from pathlib import Path


def failures_path_for(output_fpath: Path) -> Path:
    return output_fpath.with_name(f"{output_fpath.stem}_failures.jsonl")
