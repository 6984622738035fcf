"""Multi-rank pytest plugin, rank pool and conformance harness for data-parallel sharding."""
