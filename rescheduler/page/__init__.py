"""The page that shows a cluster at work: what it is sent, the log that it replays, its files."""
