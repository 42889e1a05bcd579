"""Commands: each parses, calls one flow and prints. Nothing heavy is imported before a command is chosen."""
