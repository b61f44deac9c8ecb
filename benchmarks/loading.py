"""How fast a model folder loads, beside a plain read of the same files, both from a cold disk.

    python benchmarks/loading.py --folder DIR
    python benchmarks/loading.py --gigabytes 8

Owns: the measurement. Never touches: how files are read.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from harness import Progress, Report, Row, alternate, argument_parser, machine, report, versions

from palestra.model import ModelSpec
from palestra.model.loading.weights import DTYPES, read_weights
from palestra.model.quantised.forms import FORMS
from palestra.testing.random_model import make_random_model

BUFFER_BYTES = 1 << 24
SHARE = 0.6
LAYER_BYTES = 2 * 12 * 2048**2  # of the random model, about


def make_folder(folder: Path, gigabytes: float) -> Path:
    overrides = {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_hidden_layers": max(1, round(gigabytes * 1e9 / LAYER_BYTES)),
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
    }
    return make_random_model(folder, shape="tiny", dtype="bfloat16", shards=4, overrides=overrides)


def main() -> None:
    parser = argument_parser("loading", __doc__ or "")
    parser.add_argument("--folder", type=Path, help="a model folder; without it a random one is written")
    parser.add_argument("--gigabytes", type=float, default=8.0, help="size of the random one")
    parser.add_argument("--weights", choices=list(FORMS), help="quantise on the way, without the cache")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as temporary:
        if args.folder is None:
            Progress().say("writing a random model")
        folder = args.folder or make_folder(Path(temporary) / "model", 0.5 if args.quick else args.gigabytes)
        os.environ["XDG_CACHE_HOME"] = str(Path(temporary) / "caches")
        spec, files = ModelSpec.from_folder(folder), sorted(folder.glob("*.safetensors"))

        def load() -> None:
            form = FORMS[args.weights] if args.weights else None
            read_weights(folder, spec, DTYPES[spec.dtype], args.device, form)

        def read() -> None:
            buffer = bytearray(BUFFER_BYTES)
            for file in files:
                with file.open("rb", buffering=0) as stream:
                    while stream.readinto(buffer):
                        pass

        size = sum(file.stat().st_size for file in files) / 1e9
        runs = {"ours": _cold(load, files, size), "read": _cold(read, files, size)}
        measured = alternate(runs, rounds=args.rounds or (1 if args.quick else 3))
    what = f"load {size:.1f} GB{' as ' + args.weights if args.weights else ''}, cold"
    row = Row(what, "GB/s", measured["ours"], "plain read of the files", measured["read"], target_ratio=SHARE)
    report(Report("loading", machine(), versions(["palestra", "torch"]), [row]), json_line=args.json)


def _cold(work: Callable[[], None], files: list[Path], gigabytes: float) -> Callable[[], float]:
    def run() -> float:
        for file in files:
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
                os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        start = time.perf_counter()
        work()
        return gigabytes / (time.perf_counter() - start)

    return run


if __name__ == "__main__":
    main()
