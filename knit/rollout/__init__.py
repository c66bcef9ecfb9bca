"""Rollout: SGLang engines, their client, agent loops, rewards, groups and prompt sources. No torch here."""
