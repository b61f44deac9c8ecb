"""The dashboard of a server, below `/ui`: the pages of run folders, and those of what only a server knows."""
