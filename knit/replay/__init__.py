"""Trace-driven admission replay: what a policy would do, before it costs GPU time."""
