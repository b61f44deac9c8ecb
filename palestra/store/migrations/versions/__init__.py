"""One file a step, named by its number; never changed once released."""
