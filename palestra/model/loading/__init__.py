"""A model folder, opened: its spec, weights and tokenizer; and random models for tests and demos."""
