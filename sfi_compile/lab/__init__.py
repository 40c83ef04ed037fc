"""Measuring and showing: model loading, generation, benchmarks. Nothing of the compiler imports this room."""
