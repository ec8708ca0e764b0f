"""Chunks below memory: the format of a stored chunk, a rank's disk directory, and remote stores. Decides nothing."""
