"""The dashboard: pages over run folders, live while a run writes them.

`palestra view` serves it by itself. Everything is read through `palestra.runs`; begin at `app`.
"""
