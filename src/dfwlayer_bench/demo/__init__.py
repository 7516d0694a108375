"""``dfw demo``: the layer at work, measured in front of the user."""
