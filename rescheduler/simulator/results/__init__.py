"""What a run came to: records, metrics, tables, figures."""
