"""Other packages; each is imported by its own module only."""
