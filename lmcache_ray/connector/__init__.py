"""Connectors move token rows between an engine's KV memory and the slots of an arena."""
