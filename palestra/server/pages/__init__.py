"""The dashboard of a server, below `/ui`: the pages of run folders, and those of what only a server knows.

Owns: pages and their JSON API. Begin at `app`. Never touches: what is shown; the parts of the server know it.
"""
