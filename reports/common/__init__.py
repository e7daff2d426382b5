"""What every study shows alike."""
