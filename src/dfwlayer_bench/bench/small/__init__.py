"""``dfw bench --suite small``: problems so small that what a call costs at least counts."""
