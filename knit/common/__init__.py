"""Small helpers that every room may use: Python paths, JSON lines, processes, ports."""
