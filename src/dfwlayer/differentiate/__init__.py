"""How a solution gets its derivatives."""
