"""What tinker-cookbook's distillation says about rows that were sampled elsewhere.

Runs in the cookbook's environment: `python advantages_of_rows.py ROWS URL TEACHER`. Prints the advantages of each row,
as JSON, in the last line.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import tinker
import torch
from tinker_cookbook.distillation.train_on_policy import incorporate_kl_penalty


def main(rows: Path, url: str, teacher: str) -> None:
    os.environ.setdefault("TINKER_TELEMETRY", "0")
    client = tinker.ServiceClient(base_url=url, api_key="tml-cookbook").create_sampling_client(model_path=teacher)
    data = [datum(row) for row in json.loads(rows.read_text())]
    asyncio.run(incorporate_kl_penalty(data, [client] * len(data), [0] * len(data), 1.0, 0.0))
    print(json.dumps([one.loss_fn_inputs["advantages"].to_torch().tolist() for one in data]))


def datum(row: dict[str, Any]) -> tinker.Datum:
    tokens, logprobs, mask = list(row["prompt"]), [0.0] * len(row["prompt"]), [0.0] * len(row["prompt"])
    for turn in row["turns"]:
        tokens += turn["observation"] + turn["tokens"]
        logprobs += [0.0] * len(turn["observation"]) + turn["logprobs"]
        mask += [0.0] * len(turn["observation"]) + [1.0] * len(turn["tokens"])
    inputs = {"logprobs": logprobs[1:], "mask": mask[1:], "advantages": [0.0] * (len(tokens) - 1)}
    given = {name: tinker.TensorData.from_torch(torch.tensor(values)) for name, values in inputs.items()}
    given["target_tokens"] = tinker.TensorData.from_torch(torch.tensor(tokens[1:]))
    return tinker.Datum(model_input=tinker.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=given)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
