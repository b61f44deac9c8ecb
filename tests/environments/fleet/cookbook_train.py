"""Two steps of tinker-cookbook's own training loop on Fleet tasks; run in a Python that has it and msgspec."""

from __future__ import annotations

import asyncio
import sys

from tinker_cookbook.rl import train  # type: ignore[import-not-found]

from palestra.environments.fleet.cookbook import FleetDatasetBuilder
from tests.environments.fleet.cookbook_walk import MODEL

if __name__ == "__main__":
    tasks = FleetDatasetBuilder(
        tasks_file="platform:keys?difficulty=0b,0c&count=8",
        model_name_for_tokenizer=MODEL,
        batch_size=2,
        group_size=2,
        env_config={"prompt_style": "compact"},
        eval_tasks=2,
    )
    config = train.Config(
        learning_rate=1e-4,
        dataset_builder=tasks,
        model_name=MODEL,
        recipe_name="fleet",
        max_tokens=8,
        log_path=sys.argv[1],
        max_steps=2,
        eval_every=2,
        save_every=0,
        lora_rank=4,
    )
    asyncio.run(train.main(config))
