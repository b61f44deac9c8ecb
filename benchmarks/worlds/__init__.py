"""Worlds of benchmarks, which do not change any more once something was measured on them."""
