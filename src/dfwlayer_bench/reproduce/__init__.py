"""``dfw reproduce``: the paper's tables and figures, and what they leave out."""
