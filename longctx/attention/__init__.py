"""Causal attention over packed documents: the interface that the schedule calls, and backends."""
