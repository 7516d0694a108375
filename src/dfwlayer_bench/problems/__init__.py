"""The benchmark's problems, and their exact answers."""
