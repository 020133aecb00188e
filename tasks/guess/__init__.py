"""Higher or lower: find a number in as few guesses as possible."""
