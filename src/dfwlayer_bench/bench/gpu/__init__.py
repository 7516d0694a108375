"""``dfw bench --suite gpu``: batches of small problems on a GPU, by programs and without them."""
