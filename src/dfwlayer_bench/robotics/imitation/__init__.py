"""Policies that learn an expert's actions, each with a last layer that keeps the limit."""
