"""The tiers of a world: memory, disk and remote. What they are and what is counted; bytes move elsewhere."""
