"""Sets made of others."""
