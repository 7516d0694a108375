"""Layers that guess, sample, split or round: what stands beside exact solutions, measured alike."""
