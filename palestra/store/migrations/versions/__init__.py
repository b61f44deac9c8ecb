"""One file for each migration, named by its number; a released migration is never changed."""
