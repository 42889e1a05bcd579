"""What a command does: the only room that knows several others. Torch is imported in worker processes only."""
