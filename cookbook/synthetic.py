"""A few synthetic rows for each dataset the recipes read, laid out as `datasets` finds them without a network.

Runs in the cookbook's environment (pyarrow): `python synthetic.py WORK`. A folder named like the dataset, in the folder
a recipe runs in, wins over the hub.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]

TRAIN, TEST = 256, 128  # rows: some recipes insist on batches of 128
THINGS = ["apples", "stones", "coins", "letters", "shells", "boats"]
NAMES = ["Ada", "Ben", "Cleo", "Dion", "Eva", "Finn"]


class Facts:
    """A little sum told in words, and everything the datasets want to know about it."""

    def __init__(self, rng: random.Random):
        self.name, self.thing = rng.choice(NAMES), rng.choice(THINGS)
        self.a, self.b = rng.randint(1, 20), rng.randint(1, 20)

    @property
    def question(self) -> str:
        return f"{self.name} has {self.a} {self.thing} and finds {self.b}. How many {self.thing} are there?"

    @property
    def answer(self) -> int:
        return self.a + self.b

    @property
    def told(self) -> str:
        return f"{self.name} has {self.answer} {self.thing}."


def no_robots(facts: Facts) -> Row:
    said = [("user", facts.question), ("assistant", facts.told)]
    return {"messages": [{"role": role, "content": content} for role, content in said]}


def gsm8k(facts: Facts) -> Row:
    return {"question": facts.question, "answer": f"{facts.a} + {facts.b} = {facts.answer}\n#### {facts.answer}"}


def hh_rlhf(facts: Facts) -> Row:
    prompt = f"\n\nHuman: {facts.question}\n\nAssistant: "
    return {"chosen": prompt + facts.told, "rejected": f"{prompt}Who counts {facts.thing}?"}


def deepmath(facts: Facts) -> Row:
    return {"question": facts.question, "final_answer": str(facts.answer)}


def open_thoughts(facts: Facts) -> Row:
    said = [("human", facts.question), ("gpt", facts.told)]
    return {"conversations": [{"from": who, "value": value} for who, value in said]}


def sci_know_eval(facts: Facts) -> Row:
    choices = {"label": ["A", "B"], "text": [str(facts.answer), str(facts.answer + 1)]}
    row = {"question": facts.question, "choices": choices, "answerKey": "A"}
    return row | {"domain": "Chemistry", "type": "mcq-2-choices", "details": {"level": "L3"}}


DATASETS: dict[str, tuple[Callable[[Facts], Row], str]] = {
    "HuggingFaceH4/no_robots": (no_robots, "data"),
    "openai/gsm8k": (gsm8k, "main"),
    "Anthropic/hh-rlhf": (hh_rlhf, "data"),
    "zwhe99/DeepMath-103K": (deepmath, "data"),
    "open-thoughts/OpenThoughts3-1.2M": (open_thoughts, "data"),
    "hicai-zju/SciKnowEval": (sci_know_eval, "data"),
}
"""The dataset's name, its rows, and the folder of its files."""
PROMPTS = "zwhe99/DeepMath-103K"
"""The dataset whose questions are also written as tasks for us."""

README = """---
configs:
- config_name: {name}
  data_files:
  - split: train
    path: {name}/train-*
  - split: test
    path: {name}/test-*
---
"""


PICTURES = "dpdl-benchmark/caltech101"
COLOURS = {"red_square": (220, 30, 40), "green_square": (20, 160, 60), "blue.square": (30, 60, 210)}


def write_pictures(work: Path) -> None:
    """A square of some size somewhere, and the name of its colour, with features as the published dataset has them."""
    import datasets
    from PIL import Image, ImageDraw

    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(COLOURS))})
    rng, files = random.Random(PICTURES), work / PICTURES / "data"
    files.mkdir(parents=True, exist_ok=True)
    for split, count in {"train": TRAIN // 4, "test": TEST // 4}.items():
        rows: dict[str, list[Any]] = {"image": [], "label": []}
        for number in range(count):
            label = number % len(COLOURS)
            image = Image.new("RGB", (rng.choice([64, 80, 96]), 64), (240, 240, 240))
            x, y, side = rng.randint(0, 30), rng.randint(0, 30), rng.randint(16, 32)
            ImageDraw.Draw(image).rectangle((x, y, x + side, y + side), list(COLOURS.values())[label])
            rows["image"].append(image)
            rows["label"].append(label)
        datasets.Dataset.from_dict(rows, features=features).to_parquet(files / f"{split}-00000-of-00001.parquet")


def write(work: Path) -> None:
    for name, (make_row, folder) in DATASETS.items():
        rng = random.Random(name)
        files = work / name / folder
        files.mkdir(parents=True, exist_ok=True)
        if folder != "data":  # a configuration of its own is found through the dataset's card
            (work / name / "README.md").write_text(README.format(name=folder))
        for split, count in {"train": TRAIN, "test": TEST}.items():
            rows = [make_row(Facts(rng)) for _ in range(count)]
            pq.write_table(pa.Table.from_pylist(rows), files / f"{split}-00000-of-00001.parquet")
            if name == PROMPTS and split == "train":
                lines = (json.dumps({"prompt": row["question"]}) for row in rows)
                (work / "prompts.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
    write_pictures(Path(sys.argv[1]))
