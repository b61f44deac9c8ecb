"""LoRA adapters: where their numbers live, how layers apply them, how they are saved. Begin at `adapters`."""
