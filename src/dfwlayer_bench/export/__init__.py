"""``dfw export``: deployed layers as files, checked."""
