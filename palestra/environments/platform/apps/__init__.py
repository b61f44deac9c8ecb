"""The apps: tables, seeds, tools and tasks of each."""
