"""The ``dfw`` command: the demonstration and the benchmarks. The library never imports it."""
