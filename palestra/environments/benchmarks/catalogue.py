"""The benchmarks that can be named: what grades each, which files it needs, and under which licences they are."""

from __future__ import annotations

from dataclasses import dataclass

from palestra.types.rollouts import CODING


@dataclass(frozen=True, slots=True)
class GraderPackage:
    """A package that grades in a child process, with a Python of its own if ours does not have it."""

    name: str
    """Name of the folder for its Python, below the folder of graders."""
    module: str
    """What is imported to see whether it is there."""
    install: str
    """Arguments of `pip install`."""
    more: str = ""
    """A command to run after that, with `{python}` for the Python."""


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A benchmark by its name."""

    name: str
    about: str
    grader: str
    """What decides whether an answer is right."""
    grader_license: str
    data_license: str
    page: str
    """The page where the benchmark is published."""
    hub: tuple[str, ...] = ()
    """Datasets of the Hugging Face hub that have its files; the first is the one to download."""
    files: tuple[str, ...] = ()
    """Names of its files in such a dataset or any folder, the best first."""
    get: str = ""
    """How to get the files, where that is not a dataset of the hub."""
    max_tokens: int = 2048
    """How long an answer may be where no setting says it."""
    package: GraderPackage | None = None
    environment: str | None = None
    """The environment that plays it, if it does not have its own name."""

    @property
    def how_to_get(self) -> str:
        return self.get or f"hf download --repo-type dataset {self.hub[0]}"


MATH_VERIFY = "math-verify, in a child process"
MATH_PACKAGE = GraderPackage("math-verify", "math_verify", "math-verify==0.9.0")
LM_EVAL = GraderPackage("lm-eval", "lm_eval", "'lm_eval[ifeval]==0.4.13'", "{python} -m nltk.downloader punkt_tab")
BFCL = GraderPackage(
    "bfcl",
    "bfcl_eval",
    "--no-deps bfcl-eval==2026.3.23 tree_sitter==0.21.3 tree-sitter-java==0.21.0 tree-sitter-javascript==0.21.4"
    " filelock==3.20.0 tenacity",
)

_ALL = (
    Benchmark(
        name="gsm8k",
        about="1,319 word problems of grade-school mathematics",
        grader="the rules of lm_eval's task `gsm8k`",
        grader_license="MIT",
        data_license="MIT",
        page="https://github.com/openai/grade-school-math",
        hub=("openai/gsm8k",),
        files=("main/test-*.parquet", "test.jsonl", "*gsm8k*test*.jsonl", "test*.parquet"),
        max_tokens=1024,
    ),
    Benchmark(
        name="math500",
        about="500 problems of the MATH competition dataset",
        grader=MATH_VERIFY,
        grader_license="Apache-2.0",
        data_license="MIT",
        page="https://github.com/openai/prm800k",
        hub=("HuggingFaceH4/MATH-500",),
        files=("test.jsonl", "*math*500*.jsonl", "test*.parquet", "*/test*.parquet"),
        package=MATH_PACKAGE,
    ),
    Benchmark(
        name="aime",
        about="30 problems of the American Invitational Mathematics Examination of 2024",
        grader=MATH_VERIFY,
        grader_license="Apache-2.0",
        data_license="MIT (Maxwell-Jia/AIME_2024); the problems are the MAA's",
        page="https://maa.org/maa-invitational-competitions",
        hub=("Maxwell-Jia/AIME_2024", "HuggingFaceH4/aime_2024"),
        files=("aime_2024_problems.parquet", "aime*.jsonl", "data/train-*.parquet", "train*.parquet", "*.jsonl"),
        max_tokens=8192,
        package=MATH_PACKAGE,
    ),
    Benchmark(
        name="ifeval",
        about="541 prompts with instructions that can be checked",
        grader="lm_eval's copy of the checks of google-research, strict, in a child process",
        grader_license="MIT, the checks Apache-2.0",
        data_license="Apache-2.0",
        page="https://github.com/google-research/google-research/tree/master/instruction_following_eval",
        hub=("google/IFEval",),
        files=("ifeval_input_data.jsonl", "input_data.jsonl", "*ifeval*.jsonl", "data/train-*.parquet"),
        max_tokens=1280,
        package=LM_EVAL,
    ),
    Benchmark(
        name="humaneval",
        about="164 Python functions to complete",
        grader="the tests of each task, in a process apart from the program",
        grader_license="the tests are in the data",
        data_license="MIT",
        page="https://github.com/openai/human-eval",
        hub=("openai/openai_humaneval",),
        files=("openai_humaneval/test-*.parquet", "HumanEval.jsonl", "HumanEval.jsonl.gz", "*humaneval*.jsonl"),
        max_tokens=1024,
    ),
    Benchmark(
        name="mbpp",
        about="500 short Python programs to write from a sentence and three tests",
        grader="the tests of each task, in a process apart from the program",
        grader_license="the tests are in the data",
        data_license="CC-BY-4.0",
        page="https://github.com/google-research/google-research/tree/master/mbpp",
        hub=("google-research-datasets/mbpp",),
        files=("full/test-*.parquet", "mbpp.jsonl", "*mbpp*.jsonl", "sanitized/test-*.parquet"),
        max_tokens=1024,
    ),
    Benchmark(
        name="bfcl",
        about="function calls of the Berkeley leaderboard (v4), single turn",
        grader="bfcl-eval's own checker, in a child process",
        grader_license="Apache-2.0",
        data_license="Apache-2.0",
        page="https://github.com/ShishirPatil/gorilla/tree/main/berkeley-function-call-leaderboard",
        get="its files come with the package bfcl-eval",
        max_tokens=1024,
        package=BFCL,
    ),
    Benchmark(
        name="terminal-bench",
        about="tasks at a command line, played by an agent in sandboxes",
        grader="the verifier of each task, in a sandbox apart from the agent",
        grader_license="the verifiers are in the data",
        data_license="Apache-2.0",
        page="https://www.tbench.ai",
        get="git clone https://github.com/harbor-framework/terminal-bench-2-1 terminal-bench",
        max_tokens=4096,
        environment=CODING,
    ),
)
BENCHMARKS = {one.name: one for one in _ALL}
