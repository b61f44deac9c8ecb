"""Does it fit my GPU? The memory of a model that is sampled and trained (`model_plan`), and of all that a server has on
each device (`serve_plan`), computed from configs and headers of files before anything is loaded."""
