"""Helpers of sandboxes: names of images, and the number of cores that programs are told."""

_CPU_VARIABLES = """OMP_NUM_THREADS OMP_THREAD_LIMIT OPENBLAS_NUM_THREADS MKL_NUM_THREADS NUMEXPR_NUM_THREADS
    VECLIB_MAXIMUM_THREADS BLIS_NUM_THREADS PYTHON_CPU_COUNT NUMBA_NUM_THREADS LOKY_MAX_CPU_COUNT POLARS_MAX_THREADS
    PYTEST_XDIST_AUTO_NUM_WORKERS DJANGO_TEST_PROCESSES GOMAXPROCS CARGO_BUILD_JOBS RAYON_NUM_THREADS RUST_TEST_THREADS
    UV_THREADPOOL_SIZE CMAKE_BUILD_PARALLEL_LEVEL"""


def cpu_cap_env(cpu: float | None) -> dict[str, str]:
    """Variables by which programs in a sandbox use its cores, and not as many as the machine has."""
    return {} if cpu is None else dict.fromkeys(_CPU_VARIABLES.split(), str(max(1, int(cpu))))


def rewrite_image(image: str | None, rewrites: list[dict[str, str]]) -> str | None:
    """The first rule `{from, to}` whose beginning fits changes it."""
    if image is None:
        return None
    found = (rule["to"] + image[len(rule["from"]) :] for rule in rewrites if image.startswith(rule["from"]))
    return next(found, image)
