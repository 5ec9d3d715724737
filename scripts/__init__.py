"""Development scripts; nothing here is installed."""
