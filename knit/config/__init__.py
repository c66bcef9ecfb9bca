"""The typed configuration of a run: schema, loading, rules, derived values."""
