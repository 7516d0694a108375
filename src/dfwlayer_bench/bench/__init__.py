"""``dfw bench``: every system on the same problems, one small file a cell."""
