"""Quickstart recipe: four small tasks with verifiers, a character tokenizer and a tiny Qwen3 made on the spot."""
