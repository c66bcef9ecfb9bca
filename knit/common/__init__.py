"""Small helpers that every room may use: Python paths, JSONL, processes, ports. Standard library plus psutil and orjson."""
