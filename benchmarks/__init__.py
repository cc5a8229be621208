"""Measurements: `python -m benchmarks ROUTINE --help`. A routine a file; results/ keeps figures."""
